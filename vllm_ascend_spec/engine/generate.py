"""`vllm-ascend-spec generate`: answers to a few prompts, in one process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ascend_spec import zoo
from vllm_ascend_spec.drafters import method
from vllm_ascend_spec.engine import launch
from vllm_ascend_spec.errors import UserError

MAX_MODEL_LEN = 2048  # the zoo's limit, and plenty for a trial


@dataclass(frozen=True)
class Request:
    """What to generate; `method` is a name of `drafters.METHODS` or "none"."""

    model: str
    prompts: list[str] = field(default_factory=list)
    platform: str = "auto"
    method: str = "none"
    draft: str | None = None
    draft_tokens: int = 7
    adaptive: bool = False
    max_tokens: int = 128
    temperature: float = 0.0


def run(request: Request, as_json: bool) -> None:
    """Generate and print.

    Raises:
        UserError: no prompt, an unknown method, or a drafter that is needed and not given.
    """
    prompts = request.prompts or _prompts_from_stdin()
    speculative = speculative_config(request)
    platform = launch.set_up(request.platform)
    llm = launch.make_llm(
        model_path(request.model),
        platform=platform,
        speculative_config=speculative,
        max_model_len=MAX_MODEL_LEN,
    )
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=request.temperature, max_tokens=request.max_tokens)
    for answer in llm.generate(prompts, sampling, use_tqdm=False):
        completion = answer.outputs[0]
        row = {
            "prompt": answer.prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
        }
        print(json.dumps(row, ensure_ascii=False) if as_json else completion.text)


def model_path(model: str) -> str:
    """The zoo's directory for a zoo name, unless a directory of that name is here.

    Raises:
        UserError: what can only be a path is not there; vLLM would ask the hub for it.
    """
    if model in zoo.TARGETS and not Path(model).exists():
        return str(zoo.Zoo().target(model))
    if model.startswith((".", "~")) and not Path(model).expanduser().exists():
        raise UserError(f"--model: no directory {model}. Give the checkpoint's directory.")
    return model


def served_name(model: str, arguments: list[str]) -> list[str]:
    """`arguments`, with the zoo's name as the name that clients ask for, unless one is given."""
    given = any(a.partition("=")[0] == "--served-model-name" for a in arguments)
    if given or model not in zoo.TARGETS or Path(model).exists():
        return arguments
    return [*arguments, "--served-model-name", model]


def _prompts_from_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise UserError("no prompt: give --prompt TEXT, or pipe one prompt a line")
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise UserError("no prompt: standard input is empty; give --prompt TEXT")
    return prompts


def speculative_config(request: Request) -> dict[str, Any] | None:
    if request.method == "none":
        if request.draft or request.adaptive:
            raise UserError("--draft and --adaptive need --method")
        return None
    try:
        chosen = method(request.method)
    except ValueError as error:
        raise UserError(f"--method: {error}") from None
    if request.model in zoo.TARGETS and request.draft is None:
        return zoo.Zoo().speculative_config(
            request.model, request.method, request.draft_tokens, request.adaptive
        )
    return _foreign_config(request, chosen.vllm_method, chosen.own_checkpoint)


def _foreign_config(
    request: Request, vllm_method: str | None, own_checkpoint: bool
) -> dict[str, Any]:
    if vllm_method is None:
        raise UserError(f"--method {request.method} does not run on Model Runner V2 yet")
    if own_checkpoint and request.draft is None:
        raise UserError(f"--method {request.method} needs --draft DIRECTORY, the drafter's weights")
    config: dict[str, Any] = {
        "method": vllm_method,
        "num_speculative_tokens": request.draft_tokens,
        "enable_adaptive_verification": request.adaptive,
    }
    if own_checkpoint:
        config["model"] = request.draft
    if request.method == "ngram":
        config["prompt_lookup_min"], config["prompt_lookup_max"] = zoo.NGRAM_WINDOW
    return config
