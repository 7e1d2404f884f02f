"""Runs in the double's environment: the package's torch_npu calls against the real library.

    python meta_calls.py NAMES      NAMES: JSON file with dotted names to look up

Prints JSON: what each name is, and what the attention calls give on meta tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu

from vllm_ascend_spec.engine.ascend_attention import SparseMode, fused_infer_arguments

HEADS, KV_HEADS, SIZE = 8, 2, 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> dict[str, dict[str, Any]]:
    """The operator's four uses: paged causal, paged window, paged without mask, no cache."""
    query, cache = meta(11, HEADS, SIZE), meta(10, 128, KV_HEADS, SIZE)
    mask, table = meta(2048, 2048, dtype=torch.int8), meta(4, 3, dtype=torch.int32)
    lengths = {"query_ends": [5, 9, 11], "kv_lengths": [105, 4, 384], "scale": 0.1}
    paged = {"kv_heads": KV_HEADS, "block_table": table, **lengths}
    rows = meta(11, KV_HEADS, SIZE)
    arguments = fused_infer_arguments
    return {
        "verify": arguments(query, cache, cache, sparse_mode=SparseMode.CAUSAL, mask=mask, **paged),
        "window": arguments(
            query, cache, cache, sparse_mode=SparseMode.BAND, mask=mask, window=64, **paged
        ),
        "draft block": arguments(query, cache, cache, sparse_mode=SparseMode.ALL, **paged),
        "prompt": arguments(
            query, rows, rows, query_ends=[5, 11], kv_lengths=[5, 11], kv_heads=KV_HEADS,
            scale=0.1, sparse_mode=SparseMode.CAUSAL, mask=mask,
        ),
    }  # fmt: skip


def unknown_names(operator: Any, arguments: dict[str, Any]) -> list[str]:
    known = {argument.name for argument in operator._schema.arguments}
    return sorted(set(arguments) - known)


def kinds(names: list[str]) -> dict[str, str | None]:
    """`operator`, `function` (Python of torch_npu or torch.npu), or None where it is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        last = name.rsplit(".", 1)[1]
        here: Any = {"torch": torch, "torch_npu": torch_npu}[name.split(".")[0]]
        try:
            for part in name.split(".")[1:]:
                here = getattr(here, part)
        except AttributeError:
            found[name] = None
            continue
        found[name] = "operator" if hasattr(torch.ops.npu, last) else "function"
    return found


def main() -> None:
    operator = torch.ops.npu.npu_fused_infer_attention_score
    workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
    answers = {}
    for name, arguments in cases().items():
        out, _ = operator(**arguments)
        answers[name] = {
            "shape": list(out.shape),
            "dtype": str(out.dtype),
            "rows": list(arguments["query"].shape),
            "workspace": unknown_names(workspace.default, arguments),
            "out": unknown_names(operator.out, arguments | {"workspace": None, "out": None}),
        }
    wrong = dict(cases()["verify"], actual_seq_lengths=[5, 9, 10], num_heads=7)
    answers["accepted though wrong"] = {"shape": list(operator(**wrong)[0].shape)}
    names = json.loads(Path(sys.argv[1]).read_text())
    json.dump(
        {"cases": answers, "names": kinds(names), "torch_npu": torch_npu.__version__}, sys.stdout
    )


if __name__ == "__main__":
    main()
