"""Kernel benchmarks: each verifies against `naive` before it times, prints a table, writes JSON.

PYTHONPATH=. python -m benchmarks.kernels.pack_rows --json out.json
"""

import importlib.util
from pathlib import Path

import vllm_ascend_spec

if importlib.util.find_spec("vllm_ascend_spec.kernels") is None:
    # a source tree that was not installed, as on a GPU host without pip: kernels/ lies at its root
    vllm_ascend_spec.__path__.append(str(Path(__file__).parents[2]))
