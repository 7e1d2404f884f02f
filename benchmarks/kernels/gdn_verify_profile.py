"""One launch of each bf16 launch cut at 256 requests of 8 rows, for a profiler to look at.

ncu -k "regex:(pipeline|direct|streamed)_kernel" \\
    python3 -m benchmarks.kernels.gdn_verify_profile [NAME]
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
    problem = Replay(Shape(torch.bfloat16, 256, MAX_ROWS), 2)
    for variant in opened.variants:
        if variant.state_dtype == torch.bfloat16 and wanted in variant.name:
            print(variant.name, flush=True)
            problem.calls(cuda_kernel(opened, variant))[0]()
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
