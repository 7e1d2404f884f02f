"""The calibration file of an engine: read at start-up, written while it serves and at its end."""

from __future__ import annotations

import atexit
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_spec.budget import calibration_file
from vllm_ascend_spec.budget.calibration import OnlineCalibration
from vllm_ascend_spec.budget.calibration_file import CalibrationKey
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options

logger = logging.getLogger("vllm.ascend_spec.adaptive")

SAVE_EVERY_S = 60.0


@dataclass
class CalibrationStore:
    """Where this engine's calibration comes from and goes to; both may be nowhere."""

    key: CalibrationKey
    load_from: Path | None = None
    save_to: Path | None = None
    _saved_version: int = 0
    _saved_at: float = 0.0

    @classmethod
    def of(cls, runner: Any, method: str, publishes: bool) -> CalibrationStore:
        """The store that the options of a runner ask for; one rank writes (`publishes`)."""
        config = runner.vllm_config
        options = Options.from_additional_config(config.additional_config)
        given, target = options.calibration, options.save_calibration
        return cls(
            key_of(config, runner.speculator, method),
            Path(given) if given else None,
            Path(target) if target and publishes else None,
        )

    def start(self) -> OnlineCalibration | None:
        """The calibration to start with, None to learn from nothing.

        Raises:
            UserError: the file cannot be read, or belongs to another engine; or nothing can be
                written where it was asked for.
        """
        if self.save_to is not None and not self.save_to.parent.is_dir():
            raise UserError(
                f"calibration {self.save_to}: its folder does not exist. Make it, or give another "
                "file in `save_calibration`"
            )
        if self.load_from is None:
            return None
        found = calibration_file.load(self.load_from, self.key)
        logger.info("Calibration: learnt before, from %s", self.load_from)
        return found

    def follow(self, calibration: OnlineCalibration) -> None:
        """Write at the end of this process whatever was not written before."""
        if self.save_to is not None:
            self._saved_version = calibration.version
            atexit.register(self.save, calibration)

    def step(self, calibration: OnlineCalibration) -> None:
        """Write if there is something new and the last time is long enough ago."""
        if self.save_to is None or calibration.version == self._saved_version:
            return
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save(calibration)

    def save(self, calibration: OnlineCalibration) -> None:
        """Write now, if there is something new. A full disk stops no engine: it is logged."""
        if self.save_to is None or calibration.version == self._saved_version:
            return
        try:
            calibration_file.save(self.save_to, calibration, self.key)
        except UserError as error:
            logger.warning("%s", error)
        self._saved_version, self._saved_at = calibration.version, time.monotonic()


def key_of(config: Any, speculator: Any, method: str) -> CalibrationKey:
    """What a calibration of this engine is valid for."""
    from vllm import __version__

    speculative = config.speculative_config
    return CalibrationKey(
        model=_folder(config.model_config.model),
        drafter=_folder(speculative.model if method not in ("mtp", "ngram") else ""),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        engine=f"vllm {__version__}",
        method=method,
        confidence="head" if getattr(speculator, "use_confidence_head", False) else "estimate",
        draft_tokens=int(speculative.num_speculative_tokens),
    )


def _folder(path: Any) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]
