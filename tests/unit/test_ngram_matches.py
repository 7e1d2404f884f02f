"""Confidence of n-gram drafts on the device, against the policy's own statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from vllm_ascend_spec.budget import confidence as policy  # noqa: E402
from vllm_ascend_spec.engine.ngram_matches import MatchStatistics, newest_matches  # noqa: E402

K, SLOTS = 5, 8


def column(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_scores_are_the_policys_whatever_happened_before():
    random = np.random.default_rng(0)
    ours, theirs = MatchStatistics(SLOTS, K, torch.device("cpu")), policy.MatchStatistics(SLOTS)
    slots = np.array([6, 1, 3])
    for _ in range(80):
        length = random.integers(1, 5, 3)
        scores = ours.scores(torch.from_numpy(slots), torch.from_numpy(length), column(K, K, K))
        np.testing.assert_allclose(scores, theirs.scores(slots, length, K), atol=1e-5)
        verified = random.integers(0, K + 1, 3)
        accepted = random.integers(0, verified + 1)
        ours.judge(torch.from_numpy(slots), torch.from_numpy(verified), column(*(accepted + 1)))
        theirs.observe(slots, verified, accepted)


def test_repeated_last_tokens_have_no_chance_and_teach_nothing():
    matches = MatchStatistics(SLOTS, K, torch.device("cpu"))
    scores = matches.scores(column(0, 1), column(3, 0), column(2, 0))
    assert (scores > 0).tolist() == [[True, True, False, False, False], [False] * 5]
    # Two copied tokens were accepted, and two repeated ones by luck; then one that was no copy.
    matches.judge(column(0, 1), column(4, 2), column(5, 2))
    assert matches.trials[:2].tolist() == [2.0, 0.0]
    assert matches.agreements[:2].tolist() == [2.0, 0.0]


def test_a_rejection_ends_the_trials():
    matches = MatchStatistics(SLOTS, K, torch.device("cpu"))
    matches.scores(column(2), column(3), column(K))
    matches.judge(column(2), column(4), column(2))
    assert (matches.trials[2].item(), matches.agreements[2].item()) == (2.0, 1.0)


def test_inside_a_prompt_nothing_is_judged_and_a_new_request_knows_nothing():
    matches = MatchStatistics(SLOTS, K, torch.device("cpu"))
    matches.scores(column(2), column(3), column(K))
    matches.judge(column(2), column(4), column(0))
    assert matches.trials[2].item() == 0.0
    matches.judge(column(2), column(4), column(3))
    matches.forget(column(2))
    assert matches.trials[2].item() == matches.copied[2].item() == 0.0


def test_matches_are_read_from_what_the_scan_leaves():
    """length * (max_model_len + 1) + place + 1, the best of all blocks; 0 for none."""
    limit = 100
    scratch = torch.zeros(4, 3, dtype=torch.int64)
    scratch[0, 1] = 3 * (limit + 1) + 7 + 1
    scratch[0, 2] = 2 * (limit + 1) + 50 + 1
    scratch[2, 0] = 1 * (limit + 1) + 0 + 1
    total = torch.tensor([60, 60, 4, 60])
    speculator = SimpleNamespace(
        scratch=scratch,
        max_model_len=limit,
        req_states=SimpleNamespace(total_len=SimpleNamespace(gpu=total)),
    )
    length, available = newest_matches(speculator, 3, column(0, 1, 2))
    assert length.tolist() == [3, 0, 1]
    assert available.tolist() == [60 - 7 - 3, 0, 4 - 0 - 1]


class _Recorder(TorchDispatchMode):
    """Operators that were run, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.calls.append((function.overloadpacket.__name__, tensors))
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device_or_written_from_the_host():
    """On a GPU each would wait: values read, masks as indices, numbers put at indices."""
    matches = MatchStatistics(SLOTS, K, torch.device("cpu"))
    slots, ones = column(0, 1), column(1, 1)
    with _Recorder() as recorder:
        matches.forget(slots)
        matches.judge(slots, ones, ones)
        matches.scores(slots, ones, ones)
    names = {name for name, _ in recorder.calls}
    assert names.isdisjoint({"_local_scalar_dense", "nonzero", "masked_select", "item"})
    for name, tensors in recorder.calls:
        if name in ("index_put_", "_index_put_impl_"):
            assert tensors[-1].dim() > 0, "a number is copied from the host"
            assert all(tensor.dtype is not torch.bool for tensor in tensors[1:-1])
    assert "index_put_" in names
