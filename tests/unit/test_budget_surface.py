"""The surface file: what it accepts, what it refuses and how, and that it diffs line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    LogitsPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.errors import UserError


def key(**changes: object) -> SurfaceKey:
    values: dict[str, object] = {
        "model": "hybrid-9b",
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
        "engine": "vllm 0.32.0",
        "method": "dspark",
        "draft_tokens": 7,
        "full_ladder": [8, 1, 16],
        "drafter_ladder": [7, 14],
    }
    return SurfaceKey.model_validate(values | changes)


def surface(**changes: object) -> Surface:
    values: dict[str, object] = {
        "key": key(),
        "target": [
            TargetPoint(kind=StepKind.FULL, rows=16, requests=2, context=1024, ms=6.123456),
            TargetPoint(kind=StepKind.FULL, rows=8, requests=1, context=1024, ms=5.0),
        ],
        "logits": [LogitsPoint(rows=1, ms=0.3)],
        "drafter": [DrafterPoint(requests=1, depth=7, context=1024, ms=0.9)],
        "drafter_rows": 7,
    }
    return Surface.model_validate(values | changes)


def test_a_surface_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "surface.json"
    surfaces.save(surface(), path)
    again = surfaces.load(path, key())
    assert again.key == surface().key
    assert [point.ms for point in again.target] == [5.0, 6.1235]
    surfaces.save(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_one_changed_point_is_one_changed_line() -> None:
    slower = [
        point.model_copy(update={"ms": 9.0}) if point.rows == 8 else point
        for point in surface().target
    ]
    before, after = (surfaces.dumps(s).splitlines() for s in (surface(), surface(target=slower)))
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "dense-8b"),
        ("dtype", "float16"),
        ("device", "NVIDIA H20"),
        ("engine", "vllm 0.33.0"),
        ("full_ladder", [1, 8, 32]),
        ("drafter_ladder", [7]),
        ("draft_tokens", 5),
        ("method", "dflash"),
        ("ranks", 2),
    ],
)
def test_another_key_is_refused_with_the_part_that_differs(
    tmp_path: Path, name: str, value: object
) -> None:
    path = tmp_path / "surface.json"
    surfaces.save(surface(), path)
    with pytest.raises(UserError) as refusal:
        surfaces.load(path, key(**{name: value}))
    message = str(refusal.value)
    assert str(path) in message
    assert f"{name} is {value!r} here" in message
    assert message.count(" here and ") == 1
    assert "vllm-ascend-spec profile" in message


def test_every_differing_part_is_named() -> None:
    with pytest.raises(UserError, match=r"dtype is .*; device is "):
        surfaces.require_key(surface(), key(device="Ascend 910B", dtype="float16"), "x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"target": []}, "target"),
        ({"colour": 1}, "colour"),
        ({"target": [{"kind": "full", "rows": 8, "requests": 1, "context": 0, "ms": 0}]}, "ms"),
        ({"target": [{"kind": "full", "rows": 7, "requests": 1, "context": 0, "ms": 1}]}, "7 rows"),
    ],
)
def test_a_malformed_file_is_one_clear_error(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "surface.json"
    content = json.loads(surfaces.dumps(surface())) | change
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        surfaces.load(path)


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        surfaces.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json"):
        surfaces.load(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("max_requests", "k", "ladder", "missing"),
    [
        (6, 6, [1, 8, 16, 24, 32, 40], 42),
        (32, 16, [*range(8, 513, 8)], 544),
        (8, 7, [1, 2, 4, 8, 12], 64),
        (6, 6, [1, 8, 16, 24, 32, 42], None),
        (32, 16, [*range(8, 545, 8)], None),
    ],
)
def test_the_widest_verify_step_without_a_graph_is_named(
    max_requests: int, k: int, ladder: list[int], missing: int | None
) -> None:
    point = {"kind": "full", "rows": 8, "requests": 8, "context": 0, "ms": 1}
    eager = point | {"kind": "eager"}
    made = surface(key=key(draft_tokens=k, full_ladder=ladder), target=[point, eager])
    notes = made.warnings(max_requests)
    assert (len(notes) == 1) == (missing is not None)
    if missing:
        assert f"no FULL graph of {missing} rows" in notes[0]
        assert "eager" in notes[0]
