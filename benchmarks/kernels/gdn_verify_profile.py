"""One launch of each CUDA launch cut at 256 requests of 8 rows, for a profiler to look at.

ncu --kernel-name-base demangled -k regex:gdn PYTHON -m benchmarks.kernels.gdn_verify_profile [NAME]
NAME: only launch cuts with this in their name.
"""

from __future__ import annotations

import sys

import torch
from vllm_ascend_spec.kernels.gdn_verify import cuda

from benchmarks.kernels._gdn import MAX_ROWS, Replay, Shape
from benchmarks.kernels.gdn_verify_cuda import cuda_kernel


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    opened = cuda.library()
    for state in (torch.bfloat16, torch.float32):
        problem = Replay(Shape(state, 256, MAX_ROWS), 2)
        for variant in [*opened.variants, *opened.bounds]:
            if variant.state_dtype == state and wanted in variant.name:
                print(variant.name, state, flush=True)
                problem.calls(cuda_kernel(opened, variant))[0]()
                torch.cuda.synchronize()


if __name__ == "__main__":
    main()
