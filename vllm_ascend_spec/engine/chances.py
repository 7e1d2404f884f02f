"""What the device knows of requests and of the host's calibration, for `kernels.record_round`.

The host fixes how many rows are verified by their calibrated survivals. A device that ranked them
by raw confidences would take other rows, worth less than was planned for.
"""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ascend_spec.budget.calibration import OnlineCalibration
from vllm_ascend_spec.budget.survival import ONE
from vllm_ascend_spec.kernels.record_round import RoundTables


class DeviceTables:
    """Copies on the device, written only when something changes."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._device = device
        self._version = -1
        self._chances = torch.zeros(0, device=device)
        self._classes, self._whole = (
            torch.zeros(requests, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._known = [(0, False)] * requests

    def describe(self, slot: int, sampling_class: int, whole: bool) -> None:
        """The request that has the slot: how it samples, and whether its drafts stay whole."""
        if self._known[slot] != (sampling_class, whole):
            self._known[slot] = (sampling_class, whole)
            self._classes[slot].fill_(sampling_class)
            self._whole[slot].fill_(int(whole))

    def follow(self, calibration: OnlineCalibration) -> RoundTables:
        """The tables, with the calibration's newest fit."""
        if self._version != calibration.version:
            self._version = calibration.version
            chances = calibration.table.astype("float32") / ONE
            self._chances = async_tensor_h2d(chances, device=self._device)
        return RoundTables(self._chances, self._classes, self._whole)
