"""What the demo writes down. `demo.json` is a `Report`; an arm hands its parent an `ArmRecord`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepRecord(Record):
    """One request in one decode step.

    drafted, verified, accepted: draft tokens proposed, left after trimming, accepted by the
    target. emitted: tokens of the answer that came from this step, the bonus token included; fewer
    than accepted + 1 when the answer ended inside the step. confidence: one value a drafted token,
    empty when the drafter has none. rejected_text: the first verified draft token that the target
    did not take.
    """

    engine_step: int
    drafted: int
    verified: int
    accepted: int
    emitted: int
    confidence: list[float] = []
    rejected_text: str | None = None


class AnswerRecord(Record):
    """One prompt's answer.

    pieces: the text of each answer token, so that they join to `text`. gaps: logprob of the best
    token less that of the second at each position, only without speculation. prefill_tokens: answer
    tokens that came from the prefill and not from a decode step.
    """

    prompt_id: str
    text: str
    token_ids: list[int]
    pieces: list[str]
    finished_by: str
    prefill_tokens: int
    steps: list[StepRecord]
    gaps: list[float] | None = None


class PromptRecord(Record):
    id: str
    kind: str
    text: str
    answer_schema: dict[str, Any] | None = None


class ArmRequest(Record):
    """What one arm runs: everything its process needs."""

    name: str
    model: str
    speculative_config: dict[str, Any] | None
    prompts: list[PromptRecord]
    max_tokens: int
    max_num_seqs: int
    engine: dict[str, Any] = {}


class ArmRecord(Record):
    """What one arm saw. counters: vLLM's own, for comparison; seconds: wall time."""

    name: str
    answers: list[AnswerRecord]
    confidence_source: str | None
    counters: dict[str, float]
    load_seconds: float
    generate_seconds: float
    model_runner: str
    async_scheduling: bool
    versions: dict[str, str]


class PositionRow(Record):
    """Draft position `position` (1-based).

    reached: steps in which it was verified and every earlier position was accepted. accepted: of
    those, how often it was accepted. survival: product of accepted / reached up to here, the chance
    that a draft is accepted this far. auc: of the confidence as a predictor of acceptance over the
    reached steps, None when there is no confidence or only one outcome.
    """

    position: int
    reached: int
    accepted: int
    rate: float | None
    survival: float | None
    auc: float | None


class ReliabilityBin(Record):
    low: float
    high: float
    count: int
    confidence: float | None
    accepted: float | None


class Agreement(Record):
    """Answers against those without speculation. real_prompts: the prompts that really differ."""

    equal: int
    near_tie: int
    real: int
    real_prompts: list[str] = []


class ArmRow(Record):
    """One row of the table.

    acceptance_length: answer tokens from decode steps divided by decode steps, all of them.
    acceptance_length_drafted: 1 + accepted / steps with a draft, as engines report it.
    """

    arm: str
    title: str
    status: Literal["ok", "failed", "not yet"]
    note: str = ""
    answers: int = 0
    decode_steps: int = 0
    draftless_steps: int = 0
    answer_tokens: int = 0
    acceptance_length: float | None = None
    acceptance_length_drafted: float | None = None
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    trimmed: int = 0
    rejected: int = 0
    json_answers: int = 0
    json_valid: int = 0
    schema_valid: int = 0
    agreement: Agreement | None = None
    tokens_per_second: float | None = None
    confidence_source: str | None = None
    positions: list[PositionRow] = []
    reliability: list[ReliabilityBin] = []
    calibration_error: float | None = None


class Report(Record):
    """The whole of `demo.json`."""

    name: str = "demo"
    command: str
    date: str
    device: str
    model: str
    draft_tokens: int
    max_tokens: int
    prompts: list[PromptRecord]
    versions: dict[str, str]
    seconds: float
    speed_note: str
    near_tie_gap: float
    rows: list[ArmRow]
    arms: list[ArmRecord] = Field(default_factory=list)
