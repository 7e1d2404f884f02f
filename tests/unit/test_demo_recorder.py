"""The recorder on a runner made by hand, with torch tensors and no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ascend_spec.engine.recorder import Recorder

K = 3


def batch(
    requests: list[str],
    drafted: list[int] | None,
    verified: list[int],
    *,
    prefill: list[bool] | None = None,
    prefill_len: int = 5,
) -> Any:
    count = len(requests)
    return SimpleNamespace(
        req_ids=requests,
        num_reqs=count,
        idx_mapping=torch.arange(count),
        is_prefilling_np=np.array(prefill or [False] * count),
        prefill_len_np=np.full(count, prefill_len),
        num_draft_tokens_per_req=None if drafted is None else np.array(drafted),
        cu_num_logits=torch.tensor(np.cumsum([0, *(v + 1 for v in verified)])),
    )


def runner(speculator: Any = None) -> Any:
    drafts = torch.arange(4 * K).view(4, K)
    return SimpleNamespace(
        speculator=speculator,
        req_states=SimpleNamespace(draft_tokens=drafts),
        max_num_reqs=4,
        num_speculative_steps=K,
    )


def test_trimmed_rejected_and_accepted_are_told_apart():
    recorder = Recorder()
    recorder.observe_verification(
        runner(SimpleNamespace()), batch(["a-1", "b-2"], [K, K], [1, K]), torch.tensor([2, 1])
    )
    first, second = recorder.trace("a").steps[0], recorder.trace("b").steps[0]
    assert (first.drafted, first.verified, first.accepted, first.emitted) == (K, 1, 1, 2)
    assert (second.drafted, second.verified, second.accepted, second.emitted) == (K, K, 0, 1)
    assert second.draft_tokens.tolist() == [3, 4, 5]


def test_runner_buffers_may_change_after_the_step():
    recorder = Recorder()
    step, emitted = batch(["a-1"], [K], [2]), torch.tensor([2])
    recorder.observe_verification(runner(SimpleNamespace()), step, emitted)
    step.cu_num_logits.zero_()
    emitted.zero_()
    assert (recorder.trace("a").steps[0].verified, recorder.trace("a").steps[0].emitted) == (2, 2)


def test_steps_past_the_answer_are_dropped_and_the_last_is_cut():
    recorder = Recorder()
    for emitted in (1, 4, 4, 2):
        recorder.observe_verification(
            runner(SimpleNamespace()), batch(["a-1"], [K], [K]), torch.tensor([emitted])
        )
    assert [step.emitted for step in recorder.trace("a").keep(7)] == [1, 4, 2]
    assert [step.accepted for step in recorder.trace("a").keep(7)] == [0, 3, 3]


def test_prefill_and_draftless_steps_are_recorded():
    recorder = Recorder()
    recorder.observe_verification(
        runner(), batch(["a-1"], None, [0], prefill=[True]), torch.tensor([1])
    )
    recorder.observe_verification(runner(), batch(["a-1"], None, [0]), torch.tensor([1]))
    steps = recorder.trace("a").steps
    assert [(step.prefill, step.drafted, step.emitted) for step in steps] == [
        (True, 0, 1),
        (False, 0, 1),
    ]


def test_tokens_thrown_away_at_a_preemption_do_not_count():
    recorder = Recorder()
    for emitted in (1, 3, 2):
        recorder.observe_verification(
            runner(), batch(["a-1"], None, [0], prefill=[emitted == 1]), torch.tensor([emitted])
        )
    # Resumed with four of the six tokens: the step that was under way reached nobody.
    resumed = batch(["a-1"], None, [0], prefill=[True], prefill_len=5 + 4)
    recorder.observe_verification(runner(), resumed, torch.tensor([1]))
    assert [step.emitted for step in recorder.trace("a").steps] == [1, 3, 1]


def test_confidence_belongs_to_the_drafts_that_were_verified():
    speculator = SimpleNamespace(
        use_confidence_head=True, draft_token_confidence_probs=torch.zeros(4, K)
    )
    recorder, engine = Recorder(), runner(speculator)
    recorder.observe_verification(
        engine, batch(["a-1"], None, [0], prefill=[True]), torch.tensor([1])
    )
    speculator.draft_token_confidence_probs[0] = torch.tensor([0.9, 0.5, 0.25])  # proposal
    recorder.observe_verification(engine, batch(["a-1"], [K], [K]), torch.tensor([2]))
    speculator.draft_token_confidence_probs[0] = 0.0  # the next proposal
    assert np.allclose(recorder.trace("a").steps[1].confidence, [0.9, 0.5, 0.25])
    assert recorder.confidence_source == "confidence head"


def test_largest_softmax_goes_to_its_request_and_padding_to_nobody():
    recorder = Recorder()
    logits = torch.tensor([[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]])
    recorder.observe_draft_logits(logits, torch.tensor([1, 0, -1]), torch.tensor(2), (4, K))
    recorder.observe_verification(
        runner(SimpleNamespace()), batch(["a-1", "b-2"], [K, K], [K, K]), torch.tensor([1, 1])
    )
    assert recorder.trace("b").steps[0].confidence[2] == 0.5
    assert np.isclose(recorder.trace("a").steps[0].confidence[2], torch.sigmoid(torch.tensor(5.0)))
    assert recorder.confidence_source == "max softmax"


def test_progress_counts_every_token_once():
    seen: list[int] = []
    recorder = Recorder(on_progress=seen.append)
    for _ in range(20):
        recorder.observe_verification(runner(), batch(["a-1"], None, [0]), torch.tensor([1]))
    recorder.drain()
    assert sum(seen) == 20
    assert len(seen) > 1
