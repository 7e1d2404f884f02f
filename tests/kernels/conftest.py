"""Kernel tests run on the GPU where there is one, otherwise under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from tests.interpreter import mend_interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


if INTERPRETED:
    mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session."""
    return torch.device("cpu" if INTERPRETED else "cuda")
