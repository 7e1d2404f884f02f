"""The host's calibration on the device, so that rows are ranked by what they were planned with.

The host fixes how many rows are verified by their calibrated survivals. A device that ranked them
by raw confidences would take other rows, worth less than was planned for.
"""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.survival import ONE, SCORE_LEVELS, Ints


class DeviceChances:
    """A copy of `OnlineCalibration.table` that follows its refits."""

    def __init__(self, draft_tokens: int, device: torch.device) -> None:
        self._device = device
        self._version = -1
        self._table = torch.zeros(0, dtype=torch.float32, device=device)
        self._position = torch.arange(draft_tokens, device=device) * SCORE_LEVELS
        self._stride = draft_tokens * SCORE_LEVELS

    def of(
        self, confidence: torch.Tensor, controller: BudgetController, slots: Ints
    ) -> torch.Tensor:
        """Raw confidences float [R, K] -> acceptance chances float32 [R, K], on the device.

        They lie on the host's grid, so both rank alike. A request with a confidence that is no
        number gets 1 everywhere: it ranks before all others, and its draft is verified whole.
        """
        self._follow(controller)
        valid = (confidence >= 0) & (confidence <= 1)
        score = torch.where(valid, confidence.float(), 0.0) * (SCORE_LEVELS - 1) + 0.5
        index = score.to(torch.int64) + self._position
        classes = controller.memory.classes(slots)
        if classes.any():
            index += async_tensor_h2d(classes * self._stride, device=self._device)[:, None]
        known = valid.all(dim=1, keepdim=True)
        return torch.where(known, self._table[index], 1.0)

    def _follow(self, controller: BudgetController) -> None:
        calibration = controller.calibration
        if self._version == calibration.version:
            return
        self._version = calibration.version
        chances = torch.from_numpy(calibration.table.astype("float32").reshape(-1) / ONE)
        self._table = async_tensor_h2d(chances.numpy(), device=self._device)
