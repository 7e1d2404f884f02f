"""Calibrations as files: what was learnt comes back, and nobody else's is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ascend_spec.budget import calibration_file
from vllm_ascend_spec.budget.calibration import SAMPLING_CLASSES, OnlineCalibration
from vllm_ascend_spec.budget.calibration_file import CalibrationKey
from vllm_ascend_spec.errors import UserError

K = 4
KEY = CalibrationKey(
    model="hybrid",
    drafter="hybrid-dspark",
    dtype="bfloat16",
    engine="vllm 0.32.0",
    method="dspark",
    confidence="head",
    draft_tokens=K,
)


def learnt() -> OnlineCalibration:
    """Overconfident scores, and each way to sample fails more than the one before."""
    calibration = OnlineCalibration(K)
    random = np.random.default_rng(0)
    for _ in range(60):
        scores = random.integers(300, 1000, (64, K)).astype(np.uint16)
        classes = random.integers(0, SAMPLING_CLASSES, 64)
        chance = scores / 1023 * (0.9 - 0.2 * classes[:, None])
        accepted = (random.random((64, K)) < chance).cumprod(axis=1).sum(axis=1)
        calibration.observe(scores, classes, np.full(64, K), accepted)
    return calibration


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    calibration_file.save(file, learnt(), KEY)
    return file


def test_what_was_learnt_comes_back_for_every_way_to_sample(path: Path):
    scores = np.arange(1, 1021, dtype=np.uint16).reshape(-1, K)
    again, before = calibration_file.load(path, KEY), learnt()
    tables = []
    for index in range(SAMPLING_CLASSES):
        classes = np.full(len(scores), index)
        tables.append(again.apply(scores, classes).astype(int))
        np.testing.assert_allclose(tables[-1], before.apply(scores, classes), atol=20)
    middle = [table[150:200] for table in tables]
    assert (middle[0] > middle[1]).all() and (middle[1] > middle[2]).all()


def test_learning_goes_on_from_there(path: Path):
    again = calibration_file.load(path, KEY)
    scores, classes = np.full((200, K), 800, np.uint16), np.zeros(200, dtype=np.int64)
    before = int(again.apply(scores[:1], classes[:1])[0, 0])
    for _ in range(20):
        again.observe(scores, classes, np.full(200, K), np.full(200, K))
    assert int(again.apply(scores[:1], classes[:1])[0, 0]) > before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "dense"}, "model is 'dense' here and 'hybrid' there"),
        ({"drafter": "other"}, "drafter is 'other' here and 'hybrid-dspark' there"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"engine": "vllm 0.33.0"}, "engine is 'vllm 0.33.0' here and 'vllm 0.32.0' there"),
        ({"method": "mtp"}, "method is 'mtp'"),
        ({"confidence": "estimate"}, "confidence is 'estimate' here and 'head' there"),
        ({"draft_tokens": 7}, "draft_tokens is 7 here and 4 there"),
    ],
)
def test_another_calibration_is_refused(path: Path, changed: dict[str, Any], named: str):
    with pytest.raises(UserError, match=named) as refused:
        calibration_file.load(path, KEY.model_copy(update=changed))
    assert "Drop the option `calibration`" in str(refused.value)


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"greedy": {"slope": [1, 2], "bias": [0]}}, "2 slopes and 1 biases"),
        ({"mild": {"slope": [-1], "bias": [0]}}, "slopes must lie"),
        ({"free": {"slope": [1, 1, 1, 1], "bias": [0, 0, 0, 101]}}, "biases must lie"),
        ({"free": {"slope": [1], "bias": [0]}}, "free has 1 positions, and the key has 4"),
        ({"format": 1}, "format"),
        ({"more": 1}, "more"),
    ],
)
def test_a_malformed_calibration_is_one_clear_error(
    path: Path, changes: dict[str, Any], named: str
):
    edited(path, **changes)
    with pytest.raises(UserError, match=named):
        calibration_file.load(path, KEY)


def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path):
    (tmp_path / "broken.json").write_text("{")
    for name, said in (("broken.json", "broken"), ("none.json", "No such file")):
        with pytest.raises(UserError, match=said):
            calibration_file.load(tmp_path / name, KEY)


def test_a_folder_that_is_not_there_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(UserError, match="save_calibration"):
        calibration_file.save(tmp_path / "gone" / "c.json", learnt(), KEY)
    assert list(tmp_path.iterdir()) == []
