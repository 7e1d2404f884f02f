"""A calibration as a file: where learning starts instead of taking scores at their word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_ascend_spec.budget.calibration import OnlineCalibration
from vllm_ascend_spec.errors import UserError


class CalibrationFile(BaseModel):
    """Slope (1 / temperature) and bias by position, of one method on one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model: str
    method: str
    slope: tuple[float, ...] = Field(min_length=1)
    bias: tuple[float, ...]

    @model_validator(mode="after")
    def _usable(self) -> CalibrationFile:
        if len(self.slope) != len(self.bias):
            raise ValueError(f"{len(self.slope)} slopes and {len(self.bias)} biases")
        if not all(0.0 < slope < 100.0 for slope in self.slope):
            raise ValueError("slopes must lie between 0 and 100")
        if not all(abs(bias) < 100.0 for bias in self.bias):
            raise ValueError("biases must lie between -100 and 100")
        return self


def save(path: Path, calibration: OnlineCalibration, model: str, method: str) -> None:
    """Write what was learnt for greedy requests (class 0), the reference of the others."""
    slope, bias = calibration.fitted[0].round(4).T.tolist()
    file = CalibrationFile(model=model, method=method, slope=tuple(slope), bias=tuple(bias))
    path.write_text(file.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load(path: Path, model: str, method: str, draft_tokens: int) -> OnlineCalibration:
    """UserError when the file cannot be read, is malformed, or is another model's or method's."""
    mend = "Drop the option `calibration` to learn from the start"
    try:
        file = CalibrationFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibration {path}: {error}. {mend}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"calibration {path}: {place}: {first['msg']}. {mend}") from None
    here = {"model": model, "method": method, "draft_tokens": draft_tokens}
    there = {"model": file.model, "method": file.method, "draft_tokens": len(file.slope)}
    differing = [
        f"{name} is {value!r} here and {there[name]!r} there"
        for name, value in here.items()
        if value != there[name]
    ]
    if differing:
        raise UserError(f"calibration {path}: {'; '.join(differing)}. {mend}")
    return OnlineCalibration(draft_tokens, file.slope, file.bias)
