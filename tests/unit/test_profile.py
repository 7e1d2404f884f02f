"""The cost surface as a table, as thresholds and as a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    LogitsPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.engine import profile
from vllm_ascend_spec.errors import UserError

LADDER = (1, 2, 4, 8, 16, 32, 64, 128)


def surface(row_ms: float) -> Surface:
    """A step of 5 ms and `row_ms` a row; drafting 1 ms."""
    return Surface(
        key=SurfaceKey(
            model="m",
            dtype="bfloat16",
            device="d",
            engine="e",
            method="dspark",
            draft_tokens=7,
            full_ladder=LADDER,
            mixed_ladder=(),
            drafter_ladder=(),
        ),
        target=tuple(
            TargetPoint(
                kind=StepKind.FULL,
                rows=rows,
                requests=min(rows, 16),
                context=512,
                ms=5 + row_ms * rows,
            )
            for rows in LADDER
        ),
        logits=(LogitsPoint(rows=1, ms=0.1), LogitsPoint(rows=128, ms=0.4)),
        drafter=(
            DrafterPoint(requests=1, depth=7, context=512, ms=1.0),
            DrafterPoint(requests=16, depth=7, context=512, ms=1.0),
        ),
    )


def test_thresholds_rise_with_the_price_of_a_row():
    cheap = profile.thresholds(surface(0.001), 16, 512.0)
    dear = profile.thresholds(surface(0.1), 16, 512.0)
    assert len(cheap) == len(dear) == 7
    assert sum(dear) > 5 * sum(cheap) > 0
    # 16 requests: the second position doubles 16 rows to 32, 1.6 ms of 7.6.
    assert dear[0] == pytest.approx(1.6 / 7.7, rel=0.1)


def test_the_table_has_a_row_for_every_batch_size_that_was_measured():
    assert profile.table(surface(0.01)).row_count == 3


def test_the_page_is_self_contained(tmp_path: Path):
    pytest.importorskip("plotly")
    from vllm_ascend_spec.engine.profile_page import write_page

    write_page(surface(0.01), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Survival above which a position pays" in text
    assert 'src="http' not in text


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_engine_arguments_must_be_an_object(text: str):
    with pytest.raises(UserError, match="--engine-args"):
        profile.engine_arguments(text)
