"""The acceptance model of the speed benchmark: what it draws is what it states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import acceptance

REQUESTS, K = 64, 7


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> acceptance.Draws:
    """Draws of the test's own, on its device."""
    fresh = acceptance.Draws(seed=1)
    monkeypatch.setattr(acceptance, "draws", fresh)
    return fresh


SLOTS = torch.arange(REQUESTS, dtype=torch.int32)


def test_confidences_lie_around_the_true_chance(device: torch.device) -> None:
    seen: list[torch.Tensor] = []
    manager = SimpleNamespace(
        req_states=SimpleNamespace(device=device),
        record_confidences=lambda confidence, _: seen.append(confidence.clone()),
    )
    acceptance.noisy_confidences(manager)
    batch = SimpleNamespace(num_reqs=REQUESTS, idx_mapping=SLOTS.to(device))
    for _ in range(60):
        manager.record_confidences(torch.zeros(256, K, device=device), batch)
    logits = torch.logit(torch.stack(seen).cpu())
    true = torch.logit(acceptance.chances("cpu"))
    for kind in (0, 1):
        noise = logits[:, kind::2] - true[kind]
        assert noise.mean((0, 1)).abs().max() < 0.05  # 1920 draws: 4 deviations
        assert (noise.std((0, 1)) - acceptance.NOISE).abs().max() < 0.04


def test_luck_depends_on_request_and_place_alone(device: torch.device) -> None:
    """Verified alone or beside others, a row too early or late in the batch: the same verdict."""
    seen: list[torch.Tensor] = []
    verify = acceptance._with_coins(lambda _, **named: seen.append(named["verify_draft_sampled"]))
    drafts, local = torch.arange(64, device=device), torch.arange(64, device=device) % 4 + 1
    slots, places = torch.arange(64, device=device) // 4, 300 + torch.arange(64, device=device) % 4
    for rows in (slice(None), slice(12, 40)):
        verify(
            None,
            expanded_local_pos=local[rows].int(),
            pos=places[rows],
            expanded_idx_mapping=slots[rows].int(),
            verify_draft_sampled=drafts[rows],
        )
    assert torch.equal(seen[0][12:40], seen[1])
    assert 0 < int((seen[0] == -1).sum()) < 64


def test_luck_follows_the_request_into_another_slot(
    device: torch.device, draws: acceptance.Draws
) -> None:
    seen: list[torch.Tensor] = []
    verify = acceptance._with_coins(lambda _, **named: seen.append(named["verify_draft_sampled"]))
    for slots in (list(range(16)), list(range(99, 83, -1))):
        draws.on(device)
        draws.follow({slot: number for number, slot in enumerate(slots)})
        verify(
            None,
            expanded_local_pos=torch.full((16,), 2, dtype=torch.int32, device=device),
            pos=torch.full((16,), 300, device=device),
            expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
            verify_draft_sampled=torch.arange(16, device=device),
        )
    assert torch.equal(*seen)


def test_drafts_are_rejected_at_their_rates_and_the_anchor_never(device: torch.device) -> None:
    seen: list[torch.Tensor] = []

    def judged(_: Any, **named: Any) -> None:
        seen.append(named["verify_draft_sampled"])

    verify = acceptance._with_coins(judged)
    rows = K + 1
    drafts = torch.arange(REQUESTS * rows, device=device) + 5
    local = torch.arange(len(drafts), device=device) % rows
    for step in range(100):
        verify(
            None,
            expanded_local_pos=local.int(),
            pos=1000 + 8 * step + local,
            expanded_idx_mapping=SLOTS.repeat_interleave(rows).to(device),
            verify_draft_sampled=drafts,
        )
    found = torch.stack(seen).view(100, REQUESTS, rows).cpu()
    assert bool(((found == -1) | (found == drafts.view(REQUESTS, rows).cpu())).all())
    kept = (found != -1).float()
    assert bool((kept[..., 0] == 1).all())
    true = acceptance.chances("cpu")
    for kind in (0, 1):
        assert (kept[:, kind::2, 1:].mean((0, 1)) - true[kind]).abs().max() < 0.04
