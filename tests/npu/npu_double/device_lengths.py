"""Child process: what torch_npu's attention does with lengths that lie on the device.

Run as `python -m npu_double.device_lengths` with FAKE_ACL_TRACE set; prints, for each operator and
each kind of lengths, the calls of AscendCL that it made on their account.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROWS, REQUESTS, HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 4, 2, 64, 128


def main() -> None:
    import torch
    import torch_npu

    device = torch.device("npu", 0)
    trace = Path(os.environ["FAKE_ACL_TRACE"])
    query = torch.zeros(ROWS, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(4, BLOCK, KV_HEADS * SIZE, dtype=torch.bfloat16, device=device)
    common = {
        "block_table": torch.zeros(REQUESTS, 2, dtype=torch.int32, device=device),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool, device=device),
        "input_layout": "TND",
        "block_size": BLOCK,
        "sparse_mode": 3,
        "num_key_value_heads": KV_HEADS,
    }
    operators: dict[Any, tuple[str, str, dict[str, Any]]] = {
        torch_npu.npu_fused_infer_attention_score: (
            "actual_seq_lengths", "actual_seq_lengths_kv", {"num_heads": HEADS, "scale": 0.1},
        ),
        torch_npu.npu_fused_infer_attention_score_v2: (
            "actual_seq_qlen", "actual_seq_kvlen", {"num_query_heads": HEADS, "softmax_scale": 0.1},
        ),
    }  # fmt: skip
    lengths = {"host": [4, ROWS], "device": torch.tensor([4, ROWS], dtype=torch.int32).to(device)}
    found: dict[str, dict[str, list[str]]] = {}
    for operator, (queries, keys, own) in operators.items():
        for kind, values in lengths.items():
            torch.npu.synchronize()
            before = len(trace.read_text().splitlines())
            operator(query, cache, cache, **common, **own, **{queries: values, keys: values})
            calls = trace.read_text().splitlines()[before:]
            found.setdefault(operator.__name__, {})[kind] = [call.split()[0] for call in calls]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
