"""Lengths that the host decides before a launch on vllm-ascend."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey, TargetPoint
from vllm_ascend_spec.engine.ascend_adaptive import DraftRound, LengthPlanner, trim
from vllm_ascend_spec.engine.ascend_lanes import Lane
from vllm_ascend_spec.engine.ascend_platform import check_adaptive, check_layout
from vllm_ascend_spec.engine.ascend_runner import require_one_replica
from vllm_ascend_spec.engine.metrics import EVERY_STEPS, BudgetMetrics
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options

K = 4
REQUESTS = 3
SLOTS = np.arange(REQUESTS)
EVERYONE = np.full(REQUESTS, K)


def steep() -> CostModel:
    """A target for which every row costs; steps too dear for exploring on credit."""
    return cost_of({1: 160.0, 16: 1060.0})


def stairs() -> CostModel:
    """The first draft row is dear and the next three are free: a row may pay for its followers."""
    return cost_of({3: 1000.0, 4: 1600.0, 7: 1601.0, 16: 6000.0})


def cost_of(ms: dict[int, float]) -> CostModel:
    """A target whose step of some rows takes so many ms."""
    key = SurfaceKey(
        model="m", dtype="bfloat16", device="d", engine="e", method="dspark", draft_tokens=K,
        full_ladder=(), mixed_ladder=(), drafter_ladder=(),
    )  # fmt: skip
    points = [
        TargetPoint(kind=StepKind.EAGER, rows=rows, requests=1, context=16, ms=time)
        for rows, time in ms.items()
    ]
    return CostModel(Surface(key=key, target=tuple(points)), REQUESTS, 16)


def planner(lane: Lane, cost: CostModel | None) -> LengthPlanner:
    made = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=16, lane=lane, cost=cost
    )
    for slot in range(REQUESTS):
        made.begin(slot, 0.0, 1.0)
    return made


@dataclasses.dataclass
class Arrival:
    waited: int = 0

    def synchronize(self) -> None:
        self.waited += 1


def drafts(rows: list[float], sampled: int = 1, verified: int = 0) -> DraftRound:
    """A round in which request r has the same confidence, rows[r], in each of its tokens."""
    return round_of(torch.tensor(rows)[:, None].repeat(1, K), sampled, verified)


def round_of(confidence: torch.Tensor, sampled: int = 1, verified: int = 0) -> DraftRound:
    """A round of confidences [REQUESTS, K]."""
    return DraftRound(
        SLOTS,
        np.full(REQUESTS, verified),
        torch.full((REQUESTS,), sampled),
        torch.cat([confidence, torch.zeros(1, K)]),
        Arrival(),
    )


def decide(made: LengthPlanner) -> list[int]:
    return made.lengths(SLOTS, EVERYONE, rows=REQUESTS, context=16.0).tolist()


def test_confident_requests_get_the_rows():
    made = planner(Lane.L0, steep())
    for _ in range(6):
        made.sent(drafts([0.95, 0.02, 0.5]))
        lengths = decide(made)
    assert lengths[0] > lengths[2] >= lengths[1]
    assert sum(lengths) < REQUESTS * K


def test_without_a_cost_surface_every_draft_token_is_verified():
    made = planner(Lane.L0, None)
    made.sent(drafts([0.9, 0.01, 0.01]))
    assert decide(made) == [K] * REQUESTS


def test_the_users_own_limit_holds_without_a_surface():
    made = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=16, lane=Lane.L0,
        cost=None, max_draft_rows=5,
    )  # fmt: skip
    for slot in range(REQUESTS):
        made.begin(slot, 0.0, 1.0)
    made.sent(drafts([0.9, 0.01, 0.01]))
    assert sum(decide(made)) == 5


@pytest.mark.parametrize(
    ("option", "engine", "message"),
    [
        ({"confidence": "head"}, {}, "loads no confidence head"),
        ({"planner": "vllm"}, {}, "no adaptive verification of its own"),
        ({}, {"stages": 2}, "--pipeline-parallel-size 2"),
        ({}, {"local_argmax": True}, "use_local_argmax_reduction"),
        ({}, {"draft_tokens": 16}, "num_speculative_tokens of --speculative-config is 16"),
    ],
)
def test_what_vllm_ascend_cannot_do_is_refused(
    option: dict[str, Any], engine: dict[str, Any], message: str
):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=engine.get("stages", 1)),
        speculative_config=SimpleNamespace(
            use_local_argmax_reduction=engine.get("local_argmax", False),
            num_speculative_tokens=engine.get("draft_tokens", 7),
        ),
    )
    with pytest.raises(UserError, match=message):
        check_adaptive(config, Options(adaptive=True, **option))


def test_totals_are_published_with_what_came_of_each_plan():
    registry = CollectorRegistry()
    made = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=16, lane=Lane.L0,
        cost=steep(), metrics=BudgetMetrics(registry),
    )  # fmt: skip
    for slot in range(REQUESTS):
        made.begin(slot, 0.0, 1.0)
    made.sent(drafts([0.9, 0.9, 0.9]))
    for _ in range(EVERY_STEPS + 1):
        decide(made)
        made.sent(drafts([0.9, 0.9, 0.9], sampled=2, verified=1))
    assert registry.get_sample_value("ascend_spec:steps_total") == EVERY_STEPS
    for name, each in {"verified": 1, "accepted": 1, "emitted": 2}.items():
        total = registry.get_sample_value(f"ascend_spec:{name}_total")
        assert total == EVERY_STEPS * REQUESTS * each, name
    assert registry.get_sample_value("ascend_spec:acceptance_length") == 2.0


@pytest.mark.parametrize("ladder", [(), (4, 6)])
def test_a_request_that_opted_out_keeps_its_drafts_whole(ladder: tuple[int, ...]):
    """Whatever they are worth, also where a graph would be found without them."""
    made = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=16, lane=Lane.L0,
        cost=steep(), ladder=ladder,
    )  # fmt: skip
    for slot in range(REQUESTS):
        made.begin(slot, 0.0, 1.0, whole=slot == 1)
    for _ in range(4):
        made.sent(drafts([0.3, 0.02, 0.02]))
        lengths = decide(made)
    assert lengths[1] == K and lengths[2] < K
    made.begin(1, 0.0, 1.0)
    made.sent(drafts([0.3, 0.02, 0.02]))
    assert decide(made)[1] < K, "the next request in its place did not"


def test_a_layout_of_states_that_is_not_there_is_refused():
    check_layout(Options(gdn_state="auto"))
    with pytest.raises(UserError, match='gdn_state is "replay"'):
        check_layout(Options(gdn_state="replay"))


def test_draft_lengths_are_refused():
    with pytest.raises(UserError, match="draft_lengths: vllm-ascend's drafters always"):
        check_layout(Options(draft_lengths=(2,)))


def test_replicas_that_meet_every_step_are_refused():
    require_one_replica(1)
    with pytest.raises(UserError, match="--data-parallel-size 2 on a model of experts"):
        require_one_replica(2)


@pytest.mark.parametrize(("ladder", "draft_rows"), [((), 5), ((6, 16), 3), ((8, 16), 5)])
def test_rows_that_would_find_no_graph_are_cut_to_one_that_they_fill(
    ladder: tuple[int, ...], draft_rows: int
):
    """All requests that may run do, so none is left for rows of padding."""
    made = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=16, lane=Lane.L1,
        cost=None, max_draft_rows=5, ladder=ladder,
    )  # fmt: skip
    for slot in range(REQUESTS):
        made.begin(slot, 0.0, 1.0)
    assert sum(decide(made)) == draft_rows
    assert sum(made.lengths(SLOTS, EVERYONE, REQUESTS, 16.0, in_prompt=True)) == 5


@pytest.mark.parametrize(("lane", "waits"), [(Lane.L0, 1), (Lane.L1, 0)])
def test_only_lane_0_waits_for_the_round_that_it_trims(lane: Lane, waits: int):
    made = planner(lane, steep())
    newest = drafts([0.9, 0.9, 0.9])
    made.sent(newest)
    decide(made)
    assert newest.arrived.waited == waits
    made.sent(drafts([0.9, 0.9, 0.9]))
    decide(made)
    assert newest.arrived.waited == 1


CONFIDENCES = st.lists(
    st.sampled_from([0.02, 0.3, 0.6, 0.9, 0.98]), min_size=REQUESTS * K, max_size=REQUESTS * K
).map(lambda values: torch.tensor(values).view(REQUESTS, K))


def reached(temperature: float, first: torch.Tensor, newest: torch.Tensor, position: int) -> bool:
    """Whether lane L0 verifies request 0's draft token at `position` of the newest round."""
    made = planner(Lane.L0, stairs())
    for slot in range(REQUESTS):
        made.begin(slot, temperature, 1.0)
    made.sent(round_of(first))
    decide(made)
    made.sent(round_of(newest))
    return decide(made)[0] > position


BEFORE = torch.full((REQUESTS, K), 0.3)
ALONE = torch.full((REQUESTS, K), 0.02)
ALONE[0, 0] = 0.6
FOLLOWED = ALONE.clone()
FOLLOWED[0, 1:] = 0.98


@settings(deadline=None)
@given(CONFIDENCES, CONFIDENCES, CONFIDENCES, st.integers(0, K - 2))
@example(BEFORE, ALONE, FOLLOWED, 0)
def test_a_sampled_token_is_verified_or_not_whatever_would_follow_it(
    first: torch.Tensor, newest: torch.Tensor, other: torch.Tensor, position: int
):
    """Later confidences depend on the token: were they to decide, the samples would be biased."""
    changed = newest.clone()
    changed[0, position + 1 :] = other[0, position + 1 :]
    assert reached(1.0, first, newest, position) == reached(1.0, first, changed, position)


def test_a_greedy_token_may_be_verified_for_what_follows_it():
    """There every choice of rows gives the same tokens, so the newest knowledge sets the budget."""
    assert not reached(0.0, BEFORE, ALONE, 0) and reached(0.0, BEFORE, FOLLOWED, 0)


def test_outcomes_are_counted_by_what_was_verified():
    made = planner(Lane.L0, steep())
    made.sent(drafts([0.9, 0.9, 0.9]))
    decide(made)
    made.sent(drafts([0.9, 0.9, 0.9], sampled=3, verified=2))
    decide(made)
    counters = made.controller.counters
    assert (counters.verified, counters.accepted) == (2 * REQUESTS, 2 * REQUESTS)


def test_a_round_inside_a_prompt_teaches_nothing():
    made = planner(Lane.L0, steep())
    made.sent(drafts([0.9, 0.9, 0.9], sampled=0))
    decide(made)
    made.sent(drafts([0.9, 0.9, 0.9], sampled=1, verified=2))
    decide(made)
    assert made.controller.counters.verified == 0


def test_a_new_request_does_not_inherit_drafts():
    made = planner(Lane.L0, steep())
    made.sent(drafts([0.9, 0.9, 0.9]))
    decide(made)
    made.begin(1, 0.0, 1.0)
    made.sent(drafts([0.9, 0.9, 0.9], sampled=2, verified=1))
    decide(made)
    assert made.controller.counters.verified == REQUESTS - 1


def test_what_a_step_verifies_is_kept_until_the_next_launch():
    made = planner(Lane.L0, None)
    made.launched(np.array([0, 2]), np.array([3, 1]))
    assert made.verified(SLOTS).tolist() == [3, 0, 1]
    made.launched(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert made.verified(SLOTS).tolist() == [0, 0, 0]


@dataclasses.dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    other: Any = None


def test_trimming_leaves_the_schedulers_own_output_alone():
    given = Output({"a": 5, "b": 5, "p": 9}, 19, {"a": [-1] * 4, "b": [-1] * 4}, "kept")
    trimmed = trim(given, {"a": 0, "b": 3})
    assert trimmed == Output({"a": 1, "b": 4, "p": 9}, 14, {"a": [], "b": [-1] * 3}, "kept")
    assert given == Output({"a": 5, "b": 5, "p": 9}, 19, {"a": [-1] * 4, "b": [-1] * 4}, "kept")
