"""Runs in the double's environment, on a vllm-ascend tree with the series on it.

Values of the operators that the series adds, under Triton's interpreter: JSON on standard output.
"""

from __future__ import annotations

import json
import sys

import torch
from npu_double import triton_host
from npu_double.graphs import Graphs

triton_host.install(Graphs())

from vllm_ascend.ops.gdn_ragged import ragged_recurrent_gated_delta_rule  # noqa: E402
from vllm_ascend.ops.triton.spec_decode.max_softmax import max_softmax  # noqa: E402
from vllm_ascend.ops.triton.triton_utils import init_device_properties_triton  # noqa: E402
from vllm_ascend_spec.kernels.gdn_verify.naive import gdn_verify  # noqa: E402

COLUMNS, HK, HV, DIM = 4, 2, 4, 16


def ragged_error() -> dict[str, float]:
    """Largest difference from the oracle, on lengths and accepted counts in all relations."""
    random = torch.Generator().manual_seed(3)
    lengths, accepted = [3, 1, 4, 0, 2], [1, 4, 2, 1, 3]
    starts = torch.tensor([0, 3, 4, 8, 8, 10], dtype=torch.int32)
    tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    q, k = (torch.nn.functional.normalize(normal(tokens, HK, DIM), dim=-1) for _ in range(2))
    v, log_decay, beta = normal(tokens, HV, DIM), -normal(tokens, HV).abs(), normal(tokens, HV)
    beta = beta.sigmoid()
    table = torch.arange(1, 5 * COLUMNS + 1, dtype=torch.int32).view(5, COLUMNS)
    before = normal(5 * COLUMNS + 1, HV, DIM, DIM)
    counts = torch.tensor(accepted, dtype=torch.int32)
    expected_states, states = before.clone(), before.clone()
    expected = gdn_verify(q, k, v, log_decay, beta, expected_states, starts, table, counts)
    found = ragged_recurrent_gated_delta_rule(
        query=q[None], key=k[None], value=v[None], g=log_decay[None], beta=beta[None],
        state=states, scale=DIM**-0.5, query_start_loc=starts, state_indices=table,
        num_accepted_tokens=counts,
    )[0]  # fmt: skip
    return {
        "output": float((found - expected).abs().max()),
        "states": float((states - expected_states).abs().max()),
        "changed": float((states != before).any(-1).any(-1).any(-1).sum()),
    }


def max_softmax_error() -> dict[str, float]:
    """Relative difference from float64, on a vocabulary that ends inside a tile."""
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(4)) * 6
    logits[1, :4000] = -torch.inf
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        expected = torch.softmax(given.double(), -1).amax(-1)
        errors[str(dtype)] = float(((max_softmax(given) - expected) / expected).abs().max())
    return errors


def main() -> None:
    init_device_properties_triton()
    json.dump({"ragged": ragged_error(), "max_softmax": max_softmax_error()}, sys.stdout)


if __name__ == "__main__":
    main()
