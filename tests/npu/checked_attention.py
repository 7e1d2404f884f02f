"""`npu_double.case` with every attention call of the engine checked before it is made.

python checked_attention.py REQUEST.json ANSWER.json
"""

from __future__ import annotations

import sys
from typing import Any

from npu_double import case, mutations


def check_every_call(spoil: bool = False) -> None:
    """spoil: take a token from the KV length of the first request, so that its rows exceed it."""
    import torch_npu

    from vllm_ascend_spec.engine.ascend_attention import check_call

    stock = torch_npu.npu_fused_infer_attention_score

    def checked(**arguments: Any) -> Any:
        if spoil and arguments["block_table"] is not None:
            lengths = list(arguments["actual_seq_lengths_kv"])
            arguments["actual_seq_lengths_kv"] = [
                arguments["actual_seq_lengths"][0] - 1,
                *lengths[1:],
            ]
        check_call(arguments)
        return stock(**arguments)

    def out(**arguments: Any) -> Any:
        check_call({k: v for k, v in arguments.items() if k not in ("out", "workspace")})
        return stock.out(**arguments)

    checked.out = out  # type: ignore[attr-defined]
    torch_npu.npu_fused_infer_attention_score = checked


mutations.checked = check_every_call  # type: ignore[attr-defined]
mutations.spoiled = lambda: check_every_call(spoil=True)  # type: ignore[attr-defined]

if __name__ == "__main__":
    case.main(*sys.argv[1:3])
