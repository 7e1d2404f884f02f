"""Child process: one round of confidences on its way to the host, for the trace of AscendCL.

Run as `python -m npu_double.streams`; operators compute nothing here, only the order counts.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


def main() -> None:
    import torch
    import torch_npu  # noqa: F401

    from vllm_ascend_spec.engine.ascend_runner import ConfidenceCopies

    device = torch.device("npu", 0)
    runner = SimpleNamespace(
        device=device, max_num_reqs=4, num_speculative_steps=3, speculator=SimpleNamespace()
    )
    copies = ConfidenceCopies(runner)
    sampled = torch.empty(2, dtype=torch.int32, device=device)
    torch.npu.synchronize()
    print("BEGIN", torch.npu.current_stream().stream_id, copies.stream.stream_id, flush=True)
    drafts = copies.start(np.array([0, 1]), np.array([0, 0]), sampled)
    drafts.arrived.synchronize()
    assert drafts.confidence.shape == (5, 3) and drafts.confidence.is_pinned()
    assert drafts.confidence.device.type == drafts.sampled.device.type == "cpu"


if __name__ == "__main__":
    main()
