"""From what the arms saw to the rows of the table, and the verdict on the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ascend_spec.demo import answers, metrics
from vllm_ascend_spec.demo.arms import NOT_YET, REFERENCE, Arm
from vllm_ascend_spec.demo.processes import ArmFailure
from vllm_ascend_spec.demo.records import ArmRecord, ArmRow, PromptRecord, StepRecord


def build(
    arms: Sequence[Arm],
    outcomes: dict[str, ArmRecord | ArmFailure],
    prompts: Sequence[PromptRecord],
    draft_tokens: int,
) -> list[ArmRow]:
    """One row an arm, in the order of `arms`."""
    reference = outcomes.get(REFERENCE)
    rows = []
    for arm in arms:
        outcome = outcomes.get(arm.name)
        if arm.name in NOT_YET or outcome is None:
            rows.append(ArmRow(arm=arm.name, title=arm.title, status="not yet", note=_why_not(arm)))
        elif isinstance(outcome, ArmFailure):
            rows.append(ArmRow(arm=arm.name, title=arm.title, status="failed", note=outcome.reason))
        else:
            known = reference if isinstance(reference, ArmRecord) else None
            rows.append(_row(arm, outcome, known, prompts, draft_tokens))
    return rows


def _why_not(arm: Arm) -> str:
    if arm.name in NOT_YET:
        return "does not run on Model Runner V2 yet"
    return "the zoo has no drafter of this kind for this model"


def _row(
    arm: Arm,
    record: ArmRecord,
    reference: ArmRecord | None,
    prompts: Sequence[PromptRecord],
    draft_tokens: int,
) -> ArmRow:
    steps = all_steps(record)
    total = metrics.totals(steps)
    drafting = total.drafted > 0
    reliability = metrics.reliability(steps, draft_tokens) if drafting else []
    valid = _json_counts(record, prompts)
    tokens = sum(len(answer.token_ids) for answer in record.answers)
    return ArmRow(
        arm=arm.name,
        title=arm.title,
        status="ok",
        note=arm.note,
        answers=len(record.answers),
        decode_steps=total.steps,
        draftless_steps=total.draftless,
        answer_tokens=tokens,
        acceptance_length=total.acceptance_length,
        acceptance_length_drafted=total.acceptance_length_drafted,
        drafted=total.drafted,
        verified=total.verified,
        accepted=total.accepted,
        trimmed=total.trimmed,
        rejected=total.rejected,
        json_answers=valid[0],
        json_valid=valid[1],
        schema_valid=valid[2],
        agreement=(
            answers.agreement(reference.answers, record.answers)
            if reference is not None and arm.name != REFERENCE
            else None
        ),
        tokens_per_second=tokens / record.generate_seconds,
        confidence_source=record.confidence_source,
        positions=metrics.positions(steps, draft_tokens) if drafting else [],
        reliability=reliability,
        calibration_error=metrics.calibration_error(reliability),
    )


def all_steps(record: ArmRecord) -> list[StepRecord]:
    """Decode steps of all answers."""
    return [step for answer in record.answers for step in answer.steps]


def _json_counts(record: ArmRecord, prompts: Sequence[PromptRecord]) -> tuple[int, int, int]:
    """(answers that have a schema, of those valid JSON, of those valid by the schema)."""
    schemas = {prompt.id: prompt.answer_schema for prompt in prompts}
    verdicts = [
        answers.json_verdict(answer.text, schema)
        for answer in record.answers
        if (schema := schemas[answer.prompt_id]) is not None
    ]
    return (
        len(verdicts),
        sum(parses for parses, _ in verdicts),
        sum(by_schema for _, by_schema in verdicts),
    )


def problems(rows: Sequence[ArmRow]) -> list[str]:
    """What makes the run a failure, one line each; empty when all is well."""
    found = [f"{row.title}: arm failed: {row.note}" for row in rows if row.status == "failed"]
    for row in rows:
        if row.agreement is not None and row.agreement.real:
            found.append(
                f"{row.title}: {row.agreement.real} of {row.answers} answers really differ from "
                f"no speculation (prompts {', '.join(row.agreement.real_prompts)})"
            )
    return found
