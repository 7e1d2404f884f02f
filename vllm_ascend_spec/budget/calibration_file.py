"""A calibration as a file: where learning starts instead of taking scores at their word.

JSON with a key that says what it was learnt on. Another key is refused with the parts that differ:
a calibration of another drafter would be confidently wrong until enough was learnt against it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_ascend_spec.budget.calibration import SAMPLING_CLASSES, OnlineCalibration
from vllm_ascend_spec.errors import UserError

CLASSES = ("greedy", "mild", "free")
assert len(CLASSES) == SAMPLING_CLASSES
_MEND = "Drop the option `calibration` to learn from the start"


class CalibrationKey(BaseModel):
    """What a calibration is valid for. drafter: its folder's name, "" for none of its own.

    confidence: where scores come from, since a head and an estimate mean different things.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    drafter: str
    dtype: str
    engine: str
    method: str
    confidence: str
    draft_tokens: int = Field(ge=1)


class ClassMap(BaseModel):
    """Slope (1 / temperature) and bias by position."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slope: tuple[float, ...] = Field(min_length=1)
    bias: tuple[float, ...]

    @model_validator(mode="after")
    def _usable(self) -> ClassMap:
        if len(self.slope) != len(self.bias):
            raise ValueError(f"{len(self.slope)} slopes and {len(self.bias)} biases")
        if not all(0.0 < slope < 100.0 for slope in self.slope):
            raise ValueError("slopes must lie between 0 and 100")
        if not all(abs(bias) < 100.0 for bias in self.bias):
            raise ValueError("biases must lie between -100 and 100")
        return self


class CalibrationFile(BaseModel):
    """One map for each way to sample, of one method on one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    key: CalibrationKey
    greedy: ClassMap
    mild: ClassMap
    free: ClassMap

    @model_validator(mode="after")
    def _one_length(self) -> CalibrationFile:
        for name in CLASSES:
            found = len(getattr(self, name).slope)
            if found != self.key.draft_tokens:
                raise ValueError(
                    f"{name} has {found} positions, and the key has {self.key.draft_tokens}"
                )
        return self


def save(path: Path, calibration: OnlineCalibration, key: CalibrationKey) -> None:
    """Write what was learnt, whole or not at all; UserError where it cannot be written."""
    maps = {
        name: ClassMap(slope=tuple(slope), bias=tuple(bias))
        for name, (slope, bias) in zip(
            CLASSES, calibration.fitted.round(4).transpose(0, 2, 1).tolist(), strict=True
        )
    }
    data = CalibrationFile.model_validate({"key": key, **maps}).model_dump(mode="json")
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UserError(
            f"calibration {path}: {error}. Give another file in `save_calibration`"
        ) from None


def load(path: Path, key: CalibrationKey) -> OnlineCalibration:
    """UserError when the file cannot be read, is malformed, or was learnt elsewhere."""
    try:
        file = CalibrationFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibration {path}: {error}. {_MEND}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"calibration {path}: {place}: {first['msg']}. {_MEND}") from None
    differing = [
        f"{name} is {here!r} here and {there!r} there"
        for name in CalibrationKey.model_fields
        if (here := getattr(key, name)) != (there := getattr(file.key, name))
    ]
    if differing:
        raise UserError(f"calibration {path} was learnt elsewhere: {'; '.join(differing)}. {_MEND}")
    maps = [getattr(file, name) for name in CLASSES]
    return OnlineCalibration.resumed(np.array([[m.slope, m.bias] for m in maps]).transpose(0, 2, 1))
