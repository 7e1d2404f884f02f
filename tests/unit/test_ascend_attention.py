"""Arguments of the NPU's attention operator: the right ones pass, each wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_ascend_spec.engine.ascend_attention import (
    AttentionArgumentError,
    SparseMode,
    check_call,
    fused_infer_arguments,
    with_lengths,
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


CACHE = meta(10, 128, 2, 64)
MASK = meta(2048, 2048, dtype=torch.int8)
TABLE = meta(3, 2, dtype=torch.int32)


def arguments(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "query": meta(11, 8, 64), "key": CACHE, "value": CACHE, "query_ends": [5, 9, 11],
        "kv_lengths": [105, 4, 256], "kv_heads": 2, "scale": 0.125, "block_table": TABLE,
        "sparse_mode": SparseMode.CAUSAL, "mask": MASK,
    }  # fmt: skip
    return fused_infer_arguments(**given | changes)


def test_ragged_rows_over_a_paged_cache() -> None:
    call = arguments()
    assert call["actual_seq_lengths"] == [5, 9, 11] and call["actual_seq_lengths_kv"][0] == 105
    assert (call["num_heads"], call["num_key_value_heads"], call["block_size"]) == (8, 2, 128)
    assert call["key"].shape == (10, 128, 128) and call["sparse_mode"] == 3
    assert arguments(key=meta(10, 128, 128), value=meta(10, 128, 128))["key"].shape[2] == 128
    # An empty padding request, and one that owns rows of padding.
    arguments(query_ends=[5, 5, 11], kv_lengths=[105, 1, 6])


def test_sparse_modes() -> None:
    draft = arguments(sparse_mode=SparseMode.ALL, mask=None)
    assert (draft["sparse_mode"], draft["atten_mask"]) == (0, None)
    band = arguments(sparse_mode=SparseMode.BAND, window=100)
    assert (band["sparse_mode"], band["pre_tokens"], band["next_tokens"]) == (4, 100, 0)


def test_padding_may_attend_to_nothing() -> None:
    """As vllm-ascend has it in captured launches; with any token its own rows count."""
    assert arguments(kv_lengths=[105, 4, 0])["actual_seq_lengths_kv"][2] == 0
    with pytest.raises(AttentionArgumentError, match="gives request 2 1 tokens"):
        arguments(kv_lengths=[105, 4, 1])


def test_another_ones_call_is_checked_by_its_keywords() -> None:
    call = arguments()
    check_call(call)
    check_call(arguments(sparse_mode=SparseMode.BAND, window=9))
    for change, said in (
        ({"input_layout": "BSH"}, "input_layout is BSH"),
        ({"num_heads": 4}, "num_heads is 4, query has 8"),
        ({"actual_seq_lengths": [5, 9, 10]}, "ends at 10, query has 11"),
    ):
        with pytest.raises(AttentionArgumentError, match=said):
            check_call(call | change)


def test_without_a_block_table_kv_lengths_are_cumulative() -> None:
    rows = meta(12, 2, 64)
    call = arguments(key=rows, value=rows, block_table=None, kv_lengths=[5, 9, 12])
    assert call["actual_seq_lengths_kv"] == [5, 9, 12] and call["block_table"] is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"query": meta(11, 512)}, "query has 2 dimensions"),
    ({"query": meta(11, 8, 64, dtype=torch.float32)}, "query is torch.float32"),
    ({"kv_heads": 3}, "kv_heads is 3, which does not divide 8"),
    ({"kv_heads": 0}, "kv_heads is 0"),
    ({"scale": 0.0}, "scale is 0.0"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"query_ends": torch.tensor([5, 9, 11])}, "query_ends is a tensor"),
    ({"kv_lengths": torch.tensor([5, 9, 11])}, "kv_lengths is a tensor"),
    ({"query_ends": []}, "query_ends is empty"),
    ({"query_ends": [5, 9.0, 11]}, "query_ends holds 9.0"),
    ({"query_ends": [5, 4, 11]}, "query_ends .* falls"),
    ({"query_ends": [5, 9, 10]}, "query_ends ends at 10, query has 11 rows"),
    ({"kv_lengths": [105, 4]}, "kv_lengths has 2 requests, query_ends has 3"),
    ({"kv_lengths": [105, 3, 256]}, "gives request 1 3 tokens, it has 4 query rows"),
    ({"kv_lengths": [105, -1, 256]}, "gives request 1 -1 tokens"),
    ({"kv_lengths": [105, 109, 365]}, "request 2 365 tokens, .* holds 256; .* not cumulative"),
    ({"key": meta(10, 64, 2, 64), "value": meta(10, 64, 2, 64)}, "key has blocks of 64 tokens"),
    ({"key": meta(10, 128, 4, 64)}, "key has shape .* paged cache is"),
    ({"key": meta(10, 2, 128, 64).transpose(1, 2)}, "key has heads that are not contiguous"),
    ({"key": meta(10, 128, 2, 64, dtype=torch.float16)}, "key is torch.float16"),
    ({"value": meta(9, 128, 2, 64)}, "value has shape"),
    ({"value": meta(10, 128, 2, 64, device="cpu")}, "value is on cpu, query on meta"),
    ({"block_table": meta(3, 2)}, "block_table is torch.bfloat16"),
    ({"block_table": meta(3, 2, dtype=torch.int64)}, "block_table is torch.int64"),
    ({"block_table": meta(2, 2, dtype=torch.int32)}, "block_table .* row for 3 requests"),
    ({"block_table": meta(3, 2, dtype=torch.int32, device="cpu")}, "block_table is on cpu"),
    ({"block_table": None}, "key has shape .* without a block table"),
    ({"sparse_mode": 2}, "sparse_mode is 2; used are 0"),
    ({"mask": None}, "mask is missing"),
    ({"mask": meta(11, 256, dtype=torch.int8)}, "mask is torch.int8 .11, 256."),
    ({"mask": meta(2048, 2048)}, "mask is torch.bfloat16"),
    ({"mask": meta(2048, 2048, dtype=torch.int8, device="cpu")}, "mask is on cpu"),
    ({"sparse_mode": SparseMode.ALL}, "mask is given"),
    ({"window": 64}, "window is 64 in sparse mode 3"),
    ({"sparse_mode": SparseMode.BAND}, "window is None in sparse mode 4"),
    ({"sparse_mode": SparseMode.BAND, "window": 0}, "window is 0"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_each_wrong_argument_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(AttentionArgumentError, match=f"fused_infer_attention: .*{said}"):
        arguments(**change)


def test_lengths_of_another_step_for_a_captured_call() -> None:
    call = arguments()
    updated = with_lengths(call, [8, 8, 11], [300 - 44, 1, 17])
    assert updated["actual_seq_lengths"] == [8, 8, 11] and updated["query"] is call["query"]
    assert call["actual_seq_lengths"] == [5, 9, 11]
    for ends, lengths, said in (
        ([5, 11], [9, 9], "query_ends has 2 requests, the graph was captured with 3"),
        ([5, 9, 11], [9, 9], "kv_lengths has 2 requests"),
        ([5, 9, 12], [9, 9, 9], "ends at 12, query has 11 rows"),
        ([5, 9, 11], [9, 9, 257], "holds 256"),
    ):
        with pytest.raises(AttentionArgumentError, match=said):
            with_lengths(call, ends, lengths)
    rows = meta(11, 2, 64)
    prompt = arguments(key=rows, value=rows, block_table=None, kv_lengths=[5, 9, 11])
    with pytest.raises(AttentionArgumentError, match="cumulative"):
        with_lengths(prompt, [5, 9, 11], [5, 9, 12])
