"""Speculative decoding in vLLM with per-request verification lengths, exact on hybrid models.

Importing this package imports neither torch nor vLLM: vLLM lists its plugins in every process.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-ascend-spec")
except PackageNotFoundError:  # a source tree on PYTHONPATH, as on a GPU host without pip
    __version__ = "0.0.0+source"
