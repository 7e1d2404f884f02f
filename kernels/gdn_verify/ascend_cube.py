"""`gdn_verify` in AscendC for an NPU's cube unit (csrc/ascend). Not run on an NPU: never picked.

Built only where CANN is (`ASCEND_HOME_PATH`, with `pip install --no-build-isolation`). The Triton
kernels serve NPUs until somebody has measured this one; it takes decays and gates where they take
raw gate inputs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = "libvllm_ascend_spec_npu.so"


class NotBuiltError(RuntimeError):
    """The AscendC library is not in this installation."""


def unavailable() -> str | None:
    """Why the operator cannot be called here, or None."""
    library = _library()
    if library.is_file():
        return None
    return (
        f"{library} is not there: install on a host with CANN, ASCEND_HOME_PATH set, by "
        "`pip install --no-build-isolation`"
    )


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """Contract: `naive.gdn_verify`; a request with more rows or tokens than columns is cut there.

    q, k, v are bfloat16, log_decay and beta float32, states bfloat16 or float32, indices int32, all
    contiguous on an NPU.

    Raises:
        NotBuiltError: the library was not built.
    """
    _load()
    return torch.ops.vllm_ascend_spec.gdn_verify(
        q, k, v, log_decay, beta, states, query_start_loc, state_indices, num_accepted,
        q.shape[-1] ** -0.5,
    )  # fmt: skip


def _library() -> Path:
    import vllm_ascend_spec

    return Path(vllm_ascend_spec.__file__).with_name(LIBRARY)


@functools.cache
def _load() -> None:
    problem = unavailable()
    if problem is not None:
        raise NotBuiltError(problem)
    torch.ops.load_library(str(_library()))
