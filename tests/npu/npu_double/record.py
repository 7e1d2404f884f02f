"""Writes what the double's runs showed to benchmarks/results/npu_double.json, when asked to.

After every case: the runs take an hour, and one that is stopped must not lose those before it.

VLLM_ASCEND_SPEC_RECORD=1 pytest tests/npu
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.results import RESULTS, Result, Row, versions

from .harness import double_versions
from .judge import NEAR_TIE, Judgement, Surprise, ragged_steps

_NOTES = (
    "vllm-ascend's own platform, worker, Model Runner V2, attention and GDN backends on a fake "
    "AscendCL: operator values come from CPU references, Triton kernels from the interpreter. "
    "Captured graphs are run again from a tape. Nothing of this ran on an NPU. Tokens are judged "
    "by Hugging Face's float32 logits, given the tokens before; up to "
    f"{NEAR_TIE} below the best logit is rounding."
)


class Record:
    """Collects rows of a session, and writes them whenever some were added."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        # Before the first file is written, which changes the checkout.
        self._versions = versions() | double_versions()

    def engine(self, case: str, answer: dict[str, Any], judgement: Judgement) -> None:
        """Tokens of one engine, and what speculation did in it."""
        worst = round(judgement.worst, 4)
        self._add(case, "tokens", len(judgement.gaps), "tokens")
        self._add(case, "tokens that are not the model's best", judgement.not_best, "tokens")
        self._add(case, "worst logit gap", worst, "logit", NEAR_TIE)
        for name in ("draft_tokens", "accepted_tokens"):
            if name in answer["counters"]:
                self._add(case, name.replace("_", " "), answer["counters"][name], "tokens")
        self._add(case, "steps", len(answer["steps"]), "steps")
        self._add(case, "ragged steps", ragged_steps(answer), "steps")
        for name in ("captures", "replays", "updates"):
            if answer["graphs"].get(name):
                self._add(case, f"graph {name}", answer["graphs"][name], "graphs")
        self._write()

    def sampled(self, case: str, answer: dict[str, Any], found: Surprise) -> None:
        """Sampled tokens of one engine against the model's own distribution."""
        off = round(abs(found.deviations), 3)
        self._add(case, "tokens", found.tokens, "tokens")
        self._add(case, "tokens outside the nucleus", found.outside, "tokens", 0)
        self._add(case, "log-probability off its expectation", off, "deviations", 4.0)
        self._add(case, "accepted tokens", answer["counters"]["accepted_tokens"], "tokens")
        self._add(case, "ragged steps", ragged_steps(answer), "steps")
        self._write()

    def fault(self, case: str, seen: bool) -> None:
        """Whether a fault put in on purpose changed what it must change."""
        value = float(seen)
        self.rows.append(
            Row(case=case, metric="fault seen", value=value, unit="", bar=1.0, better="higher",
                met=seen)
        )  # fmt: skip
        self._write()

    def _add(
        self, case: str, metric: str, value: float, unit: str, bar: float | None = None
    ) -> None:
        judged = {} if bar is None else {"bar": bar, "better": "lower", "met": value <= bar}
        self.rows.append(Row(case=case, metric=metric, value=value, unit=unit, **judged))

    def _write(self) -> None:
        if not os.environ.get("VLLM_ASCEND_SPEC_RECORD"):
            return
        Result(
            name="npu_double",
            command="VLLM_ASCEND_SPEC_RECORD=1 VLLM_ASCEND_SRC=... pytest tests/npu",
            device="CPU (double of an NPU)",
            repeats=1,
            versions=self._versions,
            rows=sorted(self.rows, key=lambda row: row.case),
            notes=_NOTES,
        ).write(RESULTS / "npu_double.json")
