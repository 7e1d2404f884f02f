"""What a request and a speculator tell the runner; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_spec.engine import runner
from vllm_ascend_spec.errors import UserError


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
    assert runner.method_of(DFlash2Speculator()) == "dflash2"
    assert runner.method_of(NgramGPUSpeculator()) == "ngram"
    assert runner.method_of(StandaloneARSpeculator()) == "draft_model"
    assert runner.can_skip(DFlash2Speculator())
    assert not runner.can_skip(StandaloneARSpeculator())


def test_a_batch_that_cannot_be_ranked_is_refused_at_start_up():
    runner._check_size(1024, 16)
    for requests, draft_tokens in ((1025, 7), (8, 17)):
        with pytest.raises(UserError, match="max_num_seqs"):
            runner._check_size(requests, draft_tokens)
