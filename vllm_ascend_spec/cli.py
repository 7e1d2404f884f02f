"""The command line: `vllm-ascend-spec demo | doctor | generate | patches | profile | serve`.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_spec import __version__
from vllm_ascend_spec.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding in vLLM: verification lengths per request, exact on hybrid models.",
)
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


class Platform(str, Enum):
    """Where the engine runs; `auto` takes what the installed vLLM is built for."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    ASCEND = "ascend"


PlatformOption = Annotated[Platform, typer.Option(help="Engine to set up before vLLM is imported.")]


def version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command(context_settings=PASS_THROUGH)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model directory, or a name of the zoo: hybrid, dense.")
    ],
    platform: PlatformOption = Platform.AUTO,
) -> None:
    """Serve MODEL over HTTP; every option of `vllm serve` may follow."""
    from vllm_ascend_spec.engine import launch
    from vllm_ascend_spec.engine.generate import model_path, served_name

    launch.serve(model_path(model), platform.value, served_name(model, context.args))


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Model directory, or a name of the zoo: hybrid, dense.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be repeated.")
    ] = None,
    platform: PlatformOption = Platform.AUTO,
    method: Annotated[
        str, typer.Option(help="none, ngram, mtp, eagle3, dflash, dspark, dflash2.")
    ] = "none",
    draft: Annotated[
        str, typer.Option(help="Drafter directory; the zoo's own is found by itself.")
    ] = "",
    k: Annotated[int, typer.Option("-k", min=1, help="Draft tokens a step.")] = 7,
    adaptive: Annotated[
        bool, typer.Option(help="Let verification length vary per request.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
) -> None:
    """Generate answers in one process and print them."""
    from vllm_ascend_spec.engine import generate as engine_generate

    engine_generate.run(
        engine_generate.Request(
            model=model,
            prompts=prompt or [],
            platform=platform.value,
            method=method,
            draft=draft or None,
            draft_tokens=k,
            adaptive=adaptive,
            max_tokens=max_tokens,
            temperature=temperature,
        ),
        as_json=json_output,
    )


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="Model directory, or a name of the zoo.")],
    out: Annotated[Path, typer.Option(help="Where the cost surface goes (JSON).")],
    html_path: Annotated[Path | None, typer.Option("--html", help="Plot it here.")] = None,
    method: Annotated[str, typer.Option(help="mtp, eagle3, dflash, dspark, dflash2.")] = "dspark",
    draft: Annotated[str, typer.Option(help="Drafter directory; the zoo's own is found.")] = "",
    k: Annotated[int, typer.Option("-k", min=1, help="Draft tokens a step.")] = 7,
    platform: PlatformOption = Platform.AUTO,
    engine_args: Annotated[
        str, typer.Option(help="More of vLLM's engine arguments, as a JSON object.")
    ] = "{}",
) -> None:
    """Measure what a step costs on this machine, for ascend_spec.cost_surface."""
    from vllm_ascend_spec.engine import generate as engine_generate
    from vllm_ascend_spec.engine import profile as engine_profile

    request = engine_generate.Request(
        model=model,
        prompts=[],
        platform=platform.value,
        method=method,
        draft=draft or None,
        draft_tokens=k,
        adaptive=True,
        max_tokens=1,
        temperature=0.0,
    )
    engine = engine_profile.engine_arguments(engine_args)
    raise typer.Exit(engine_profile.run(request, out, html_path, engine))


@app.command()
def demo(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Write the page here.")] = None,
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated, out of none, ngram, mtp, eagle3, dflash, dspark, ..."),
    ] = "",
    prompts: Annotated[int | None, typer.Option(min=1, help="Held-out prompts an arm.")] = None,
    model: Annotated[str, typer.Option(help="Target of the zoo: hybrid or dense.")] = "hybrid",
) -> None:
    """Every drafting method on a trained hybrid model in real vLLM, side by side."""
    from vllm_ascend_spec import demo as demonstration

    chosen = [name.strip() for name in methods.split(",") if name.strip()] or None
    raise typer.Exit(demonstration.run(chosen, prompts, json_path, html_path, model))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What this machine can run, and why not the rest. Exit 1 when nothing is usable."""
    from vllm_ascend_spec import doctor as examination

    raise typer.Exit(examination.run(as_json))


class PatchedEngine(str, Enum):
    """Upstream project that a series is for."""

    VLLM = "vllm"
    VLLM_ASCEND = "vllm-ascend"


patches = typer.Typer(
    no_args_is_help=True, help="The plugin's changes as in-tree changes, to offer upstream."
)
app.add_typer(patches, name="patches")


@patches.callback()
def patches_root() -> None:
    """Keeps `export` a command of its own."""


@patches.command("export")
def patches_export(
    engine: Annotated[PatchedEngine, typer.Option(help="Project that the series is for.")],
    source: Annotated[
        Path, typer.Option(help="Its tree: vllm 0.32, or vllm-ascend main of 2026-08-22 (182b75e).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the series; holds no patches yet.")],
) -> None:
    """Write a `git format-patch` series against SOURCE, signed off by git's user."""
    from vllm_ascend_spec.patches import export

    export.run(engine.value, source, out)


def main() -> None:
    """Entry point: an error that the user can mend is one line without a traceback."""
    try:
        app()
    except UserError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(2) from None
