"""Causal depthwise convolution over ragged rows, token by token: the oracle of `conv_verify`.

A request's window holds its latest inputs, oldest first. Rolling back needs the inputs of every
row that may be rejected, so a window is W - 2 + C long for C rows a step, W the kernel's width:
after a step with rows x_0 .. x_{T-1} it reads

    [h_1 .. h_{W-2}, x_0 .. x_{T-1}, stale ...]

where h_0 .. h_{W-2} is the history that the step itself read. Accepting n tokens moves the start
of the next history to n - 1, whatever the next step drafts.

Shapes: x and the output [N, D]; weight [D, W]; bias [D] or None; windows [slots, L, D], updated
in place; query_start_loc [R + 1]; slots [R]. Computation is float64 if x is, otherwise float32.

Slot 0 is vLLM's null block: it is never read nor written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

NULL_SLOT = 0


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    silu: bool = True,
) -> Tensor:
    """Convolve the verification rows of R requests and leave windows that can be rolled back.

    A request without rows, with nothing accepted, or with a null slot changes nothing, and its
    output is zero.

    Args:
        num_accepted: [R] tokens emitted by the previous step, bonus token included.

    Returns:
        [N, D], dtype of x.

    Raises:
        ValueError: a window is too short for the request's rows or accepted count.
    """
    out = torch.zeros_like(x)
    width = weight.shape[1]
    for request, (first, last) in enumerate(_bounds(query_start_loc)):
        slot, accepted = int(slots[request]), int(num_accepted[request])
        if first == last or accepted <= 0 or slot <= NULL_SLOT:
            continue
        room = windows.shape[1] - (width - 2)
        if max(last - first, accepted) > room:
            raise ValueError(
                f"request {request}: {last - first} rows, {accepted} accepted, but a window of "
                f"{windows.shape[1]} entries holds {room} rows"
            )
        history = windows[slot, accepted - 1 : accepted + width - 2]
        sequence = torch.cat((history.to(x.dtype), x[first:last]))
        _convolve(sequence, weight, bias, silu, out[first:last])
        windows[slot, : len(sequence) - 1] = sequence[1:].to(windows.dtype)
    return out


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    silu: bool = True,
) -> Tensor:
    """Convolve R prompt chunks (or plain decode rows); windows keep the last W - 1 inputs.

    Args:
        has_initial_state: [R] bool; False starts from zeros, whatever the recycled slot holds.

    Returns:
        [N, D], dtype of x; zero for a request whose slot is null.
    """
    out = torch.zeros_like(x)
    width = weight.shape[1]
    for request, (first, last) in enumerate(_bounds(query_start_loc)):
        slot = int(slots[request])
        if first == last or slot <= NULL_SLOT:
            continue
        history = windows[slot, : width - 1].to(x.dtype)
        if not bool(has_initial_state[request]):
            history = torch.zeros_like(history)
        sequence = torch.cat((history, x[first:last]))
        _convolve(sequence, weight, bias, silu, out[first:last])
        windows[slot, : width - 1] = sequence[-(width - 1) :].to(windows.dtype)
    return out


def _convolve(
    sequence: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, out: Tensor
) -> None:
    dtype = torch.float64 if sequence.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    for token in range(len(out)):
        total = torch.zeros_like(out[token], dtype=dtype) if bias is None else bias.to(dtype)
        for tap in range(width):
            total = total + sequence[token + tap].to(dtype) * weight[:, tap].to(dtype)
        out[token] = (total * torch.sigmoid(total) if silu else total).to(out.dtype)


def _bounds(query_start_loc: Tensor) -> list[tuple[int, int]]:
    starts = query_start_loc.tolist()
    return list(pairwise(starts))
