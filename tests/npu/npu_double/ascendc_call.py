"""Child process: csrc/ascend's torch binding on the double, called as on an NPU.

Run as `python -m npu_double.ascendc_call LIBRARY GIVEN FOUND`; GIVEN holds the arguments of each
call by its name (torch), FOUND gets `out` and `states` of each, or its `error`.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main(library: str, given: str, found: str) -> None:
    import torch
    import torch_npu  # noqa: F401

    from .device import NpuDouble, host_alias
    from .graphs import Graphs

    torch.ops.load_library(library)

    def answer(arguments: dict[str, Any]) -> dict[str, Any]:
        scale = arguments.pop("scale")
        on_device = {name: tensor.to("npu:0") for name, tensor in arguments.items()}
        try:
            out = torch.ops.vllm_ascend_spec.gdn_verify(**on_device, scale=scale)
        except RuntimeError as error:
            return {"error": str(error)}
        return {"out": host_alias(out).clone(), "states": host_alias(on_device["states"]).clone()}

    with NpuDouble(Graphs()):
        answers = {name: answer(arguments) for name, arguments in torch.load(given).items()}
    torch.save(answers, found)
    sys.stdout.flush()
    # torch_npu's own shutdown waits for threads that the double never started.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:4])
