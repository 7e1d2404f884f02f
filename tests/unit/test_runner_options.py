"""What a request and a speculator tell the runner; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_spec.engine import abilities, runner
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options


def params(extra: object) -> SimpleNamespace:
    return SimpleNamespace(extra_args=extra)


def test_requests_are_adaptive_unless_they_opt_out():
    assert runner.wants_adaptive(params(None))
    assert runner.wants_adaptive(params({"other": 1}))
    assert runner.wants_adaptive(params({"ascend_spec_adaptive": 1}))
    assert not runner.wants_adaptive(params({"ascend_spec_adaptive": False}))


@pytest.mark.parametrize("bad", ["no", 2, None, {}])
def test_a_mistyped_wish_is_refused_by_name(bad: object):
    with pytest.raises(UserError, match="extra_args"):
        runner.wants_adaptive(params({"ascend_spec_adaptive": bad}))


class DFlashSpeculator:
    """Stands for upstream's class of that name."""


class DFlash2Speculator(DFlashSpeculator):
    """Stands for upstream's class of that name."""


class NgramGPUSpeculator:
    """Stands for upstream's class of that name."""


class StandaloneARSpeculator:
    """Stands for upstream's class of that name."""


def test_methods_and_what_can_be_skipped_follow_the_class():
    assert abilities.method_of(DFlash2Speculator()) == "dflash2"
    assert abilities.method_of(NgramGPUSpeculator()) == "ngram"
    assert abilities.method_of(StandaloneARSpeculator()) == "draft_model"
    assert abilities.can_skip(DFlash2Speculator())
    assert not abilities.can_skip(StandaloneARSpeculator())


def test_a_batch_that_cannot_be_ranked_is_refused_at_start_up():
    runner._check_size(1024, 16)
    for requests, draft_tokens in ((1025, 7), (8, 17)):
        with pytest.raises(UserError, match="max_num_seqs"):
            runner._check_size(requests, draft_tokens)


def test_draft_lengths_are_for_drafters_that_pay_for_every_token():
    class MTPSpeculator:
        pass

    class DFlashSpeculator:
        pass

    shorter = Options(draft_lengths=(4, 2))
    assert abilities.draft_lengths(shorter, MTPSpeculator(), 7) == (2, 4, 7)
    assert abilities.draft_lengths(Options(), MTPSpeculator(), 7) == ()
    with pytest.raises(UserError, match="dflash drafts its tokens at once"):
        abilities.draft_lengths(shorter, DFlashSpeculator(), 7)
    with pytest.raises(UserError, match="holds 4, more than num_speculative_tokens = 3"):
        abilities.draft_lengths(shorter, MTPSpeculator(), 3)
