"""The benchmark's acceptance model: requests differ, and confidences know it, with noise.

vLLM's synthetic acceptance has one rate for all requests, and confidences of dummy weights mean
nothing. Here a request slot is easy or hard by its parity. Draft tokens that the model rejects
reach rejection sampling as the placeholder -1, which it refuses; all others are accepted by vLLM's
own synthetic mode at rate 1. A confidence is the request's true chance with normal noise on its
logit. Switched on by the benchmark alone; no arm runs without it but the one without speculation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ascend_spec.engine.patching import Replacement, declare

EASY = (0.90, 0.80, 0.72, 0.65, 0.59, 0.54, 0.49)
HARD = (0.55, 0.30, 0.17, 0.09, 0.05, 0.03, 0.02)
NOISE = 0.5  # standard deviation of a confidence's logit around the true one

_TARGET = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify"


def conditional(unconditional: tuple[float, ...]) -> list[float]:
    """Chance of each position given that every one before it was accepted."""
    before = (1.0, *unconditional)
    return [p / q for p, q in zip(unconditional, before, strict=False)]


def chances(device: torch.device | str) -> torch.Tensor:
    """float32 [2, 7]: conditional acceptance of easy (row 0) and hard (row 1) requests."""
    return torch.tensor([conditional(EASY), conditional(HARD)], device=device)


def install() -> None:
    """Declare the replacement; before the engine is built."""
    declare(
        Replacement(
            target=_TARGET,
            reason="benchmark: acceptance differs from request to request",
            make=_with_coins,
        )
    )


def speculative_options(draft_tokens: int) -> dict[str, Any]:
    """What an arm's speculative config says about acceptance."""
    return {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0] * draft_tokens,
    }


def noisy_confidences(manager: Any) -> None:
    """Let this adaptive manager see the model's confidences instead of the drafter's."""
    record: Callable[[torch.Tensor, Any], None] = manager.record_confidences
    table = torch.logit(chances(manager.req_states.device))
    rounds = itertools.count(1)

    def record_noisy(confidence: torch.Tensor, input_batch: Any) -> None:
        # One launch: an arm must not pay on the host for what the benchmark adds to it.
        noisy = torch.empty_like(confidence[: input_batch.num_reqs])
        _noisy_kernel[(input_batch.num_reqs,)](
            noisy, input_batch.idx_mapping, table, next(rounds), noisy.stride(0),
            K=noisy.shape[1], K2=triton.next_power_of_2(noisy.shape[1]), WIDTH=table.shape[1],
            NOISE_SCALE=NOISE,
        )  # fmt: skip
        record(noisy, input_batch)

    manager.record_confidences = record_noisy


def _with_coins(original: Any) -> Any:
    tables: dict[torch.device, torch.Tensor] = {}
    rounds = itertools.count(1)

    def _verify(self: Any, *args: Any, **named: Any) -> Any:
        values = dict(zip(_NAMES, args, strict=False)) | named
        drafts = values["verify_draft_sampled"]
        if drafts.device not in tables:  # making it waits for the device
            tables[drafts.device] = chances(drafts.device)
        kept = torch.empty_like(drafts)
        _coin_kernel[(triton.cdiv(drafts.numel(), _BLOCK),)](
            kept, drafts, values["expanded_local_pos"], values["expanded_idx_mapping"],
            tables[drafts.device], next(rounds), drafts.numel(),
            WIDTH=tables[drafts.device].shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
        values["verify_draft_sampled"] = kept
        return original(self, **values)

    return _verify


@triton.jit(do_not_specialize=["seed"])
def _noisy_kernel(
    noisy_ptr, slots_ptr, logits_ptr, seed, stride,
    K: tl.constexpr, K2: tl.constexpr, WIDTH: tl.constexpr, NOISE_SCALE: tl.constexpr,
):  # fmt: skip
    """Confidences of one request a program: the true logit of its class with normal noise."""
    request = tl.program_id(0)
    position = tl.arange(0, K2)
    kind = tl.load(slots_ptr + request) % 2
    true = tl.load(logits_ptr + kind * WIDTH + position, mask=position < K, other=0.0)
    noise = NOISE_SCALE * tl.randn(seed, request * K2 + position)
    tl.store(noisy_ptr + request * stride + position, tl.sigmoid(true + noise), mask=position < K)


@triton.jit(do_not_specialize=["seed", "rows"])
def _coin_kernel(
    kept_ptr, drafts_ptr, positions_ptr, slots_ptr, chances_ptr, seed, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draft tokens that the model accepts, -1 for the others; position 0 is the bonus token's."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    position = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int32)
    kind = (tl.load(slots_ptr + row, mask=real, other=0) % 2).to(tl.int32)
    place = kind * WIDTH + tl.maximum(position - 1, 0)
    rate = tl.load(chances_ptr + place, mask=real, other=0.0)
    keep = (position == 0) | (tl.rand(seed, row) < rate)
    draft = tl.load(drafts_ptr + row, mask=real, other=0)
    tl.store(kept_ptr + row, tl.where(keep, draft, -1), mask=real)


_BLOCK = 256
_NAMES = (
    "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
    "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np",
    "verify_draft_sampled",
)  # fmt: skip
