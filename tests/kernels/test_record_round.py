"""`record_round`: the launch against the oracle, and what the oracle promises."""

from __future__ import annotations

import pytest
import torch

from kernels.record_round import RoundTables, Verdict, naive, triton

SLOTS, K, LEVELS, CLASSES = 40, 7, 64, 3


def tables(device: torch.device) -> RoundTables:
    generator = torch.Generator().manual_seed(3)
    return RoundTables(
        torch.rand(CLASSES, K, LEVELS, generator=generator).to(device),
        torch.randint(0, CLASSES, (SLOTS,), generator=generator, dtype=torch.int32).to(device),
        (torch.rand(SLOTS, generator=generator) < 0.2).int().to(device),
    )


@pytest.mark.parametrize("requests", [1, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("verified", [True, False])
def test_the_launch_equals_the_oracle(
    requests: int, dtype: torch.dtype, verified: bool, device: torch.device
) -> None:
    torch.manual_seed(requests)
    confidence = torch.rand(requests, K).to(dtype)
    confidence[0, 3] = float("nan")
    confidence[-1, 0] = 1.0
    slots = torch.randperm(SLOTS)[:requests].int()
    counts = torch.arange(requests, dtype=torch.int32)
    found = []
    for record, where in ((naive, torch.device("cpu")), (triton, device)):
        ranking = torch.full((SLOTS, K), -1.0, device=where)
        figures = torch.full((requests + 2, K + 2), -1.0, device=where)
        verdict = Verdict(counts.to(where) if verified else None, (counts + 1).to(where))
        record.record_round(
            confidence.to(where), slots.to(where), tables(where), ranking, figures, verdict
        )
        found.append((ranking.cpu(), figures.cpu()))
    (ranking, figures), (got_ranking, got_figures) = found
    torch.testing.assert_close(got_ranking, ranking, rtol=0, atol=0)
    torch.testing.assert_close(got_figures, figures, rtol=0, atol=0, equal_nan=True)
    assert (ranking[slots[0].long()] == 1).all()  # no number: ranked before all others
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[slots.long()] = False
    assert (got_ranking[untouched] == -1).all() and (got_figures[requests:] == -1).all()
    assert (got_figures[:requests, K] == (counts.float() if verified else 0)).all()


def test_without_figures_only_the_ranking_is_written(device: torch.device) -> None:
    confidence = torch.rand(4, K, device=device)
    slots = torch.tensor([5, 1, 9, 2], dtype=torch.int32, device=device)
    ranking = torch.full((SLOTS, K), -1.0, device=device)
    triton.record_round(confidence, slots, tables(device), ranking)
    assert int((ranking[:, 0] >= 0).sum()) == 4


def test_a_tensor_that_does_not_fit_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match="ranking has size"):
        naive.record_round(
            torch.rand(2, K, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
            tables(device),
            torch.zeros(SLOTS, K + 1, device=device),
        )
