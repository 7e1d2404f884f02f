"""The optional extension module `_host`, or None where the install had no compiler."""

from __future__ import annotations

import importlib
from typing import Any


def _load() -> Any:
    try:
        return importlib.import_module("vllm_ascend_spec._host")
    except ImportError:
        return None


host: Any = _load()
