"""GDN metadata on vllm-ascend: anchor-only rows, padding, and when its operator is right."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_spec.engine import ascend_gdn

K = 3


@dataclass
class Hybrid:
    is_prefilling: torch.Tensor
    num_decode_draft_tokens_cpu: torch.Tensor | None


@dataclass
class Common:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor


def starts(*rows: int) -> torch.Tensor:
    return torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def kinds(rows: list[int], prefilling: list[bool], drafts: list[int]) -> list[int]:
    given = Hybrid(torch.tensor(prefilling), torch.tensor(drafts))
    marked = ascend_gdn.with_row_kinds(given, starts(*rows))
    assert given.num_decode_draft_tokens_cpu.tolist() == drafts, "the step's own was changed"
    return marked.num_decode_draft_tokens_cpu.tolist()


def test_a_decoding_request_without_a_draft_verifies_its_anchor():
    assert kinds([4, 1, 9], [False, False, True], [3, -1, -1]) == [3, 0, -1]


def test_a_prompts_last_token_stays_a_prompt_chunk():
    assert kinds([4, 1], [False, True], [3, -1]) == [3, -1]


def test_padding_is_marked_only_while_a_batch_is_prepared():
    seen = []

    def prepare_attn(self: Any, batch: Any) -> None:
        seen.append(kinds([4, 2, 4, 4], [False] * 4, [3, 1, -1, -1]))

    ascend_gdn.with_real_requests(prepare_attn)(None, SimpleNamespace(num_reqs=2))
    assert seen == [[3, 1, -2, -2]]
    assert kinds([4, 4], [False] * 2, [3, -1]) == [3, -1]


def test_without_speculation_nothing_is_marked():
    given = Hybrid(torch.tensor([False]), None)
    assert ascend_gdn.with_row_kinds(given, starts(1)) is given


def build(rows: list[int], drafts: list[int]) -> tuple[Any, Common]:
    """What the wrapped builder returns, and the row boundaries that vllm-ascend's got."""
    got: list[Common] = []

    def original(self: Any, prefix: int, common: Common, accepted: Any, drafts: Any) -> Any:
        got.append(common)
        masks = drafts >= 0 if (drafts >= 0).any() else None
        return SimpleNamespace(spec_sequence_masks=masks)

    builder = SimpleNamespace(num_spec=K)
    common = Common(starts(*rows), starts(*rows))
    wrapped = ascend_gdn.build_for_any_rows(original)
    accepted = torch.ones(len(rows), dtype=torch.int32)
    metadata = wrapped(
        builder, 0, common, num_accepted_tokens=accepted,
        num_decode_draft_tokens_cpu=torch.tensor(drafts),
    )  # fmt: skip
    return metadata, got[0]


def test_padding_requests_have_no_rows():
    _, got = build([4, 4, 4, 4], [3, 3, -2, -2])
    assert got.query_start_loc_cpu.tolist() == [0, 4, 8, 8, 8]
    assert got.query_start_loc.tolist() == [0, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("rows", "drafts", "right"),
    [
        ([4, 4], [3, 3], True),
        ([4, 4, 9], [3, 3, -1], True),
        ([4, 4, 4, 4], [3, 3, -2, -2], True),
        ([4, 2], [3, 1], False),
        ([1, 4], [0, 3], False),
        ([2, 2], [1, 1], False),
        ([9], [-1], True),
    ],
)
def test_the_stock_operator_runs_rows_of_k_plus_1_only(
    rows: list[int], drafts: list[int], right: bool
):
    metadata, _ = build(rows, drafts)
    assert (metadata.stock_obstacle is None) is right


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_graph_captured_for_adaptive_steps_holds_the_plugins_kernel(adaptive: bool):
    def original(self: Any, common: Any) -> Any:
        return SimpleNamespace(spec_sequence_masks=torch.tensor([True]), stock_obstacle=None)

    config = SimpleNamespace(additional_config={"ascend_spec": {"adaptive": adaptive}})
    wrapped = ascend_gdn.captured_for_any_lengths(original)
    metadata = wrapped(SimpleNamespace(vllm_config=config), None)
    assert (metadata.stock_obstacle is not None) is adaptive
