"""The small system of a verification step, and the products with a state, for CUDA and Ascend.

With X = [K; Q], the T rows of K and the T rows of Q of one step stacked, `S` the state that the
step starts from and Y = X S^T, the updates U and the outputs O of a head solve one unit lower
triangular system

    [[I + L, 0], [-M, I]] [U; O] = [b (V - Y_K); Y_Q]

(L and M: `replay_naive.py`). The systems of several heads are solved together, on vectors and in
fp32: one such system is far smaller than a program.

Per row, everything is kept transposed, [dv, rows]: the state is then the left operand as it lies in
memory, and an accumulator is the left operand of the next product without changing its layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NORM_EPSILON = tl.constexpr(1e-6)
_SOFTPLUS_LINEAR = tl.constexpr(20.0)  # above it softplus(x) is x in fp32


def dot_precision(state_dtype: torch.dtype, device: torch.device) -> str:
    """How `dot_fp32` multiplies: Ascend has no tf32, and CUDA no fp32 on its tensor cores."""
    if state_dtype != torch.float32:
        return "bf16x3"
    return "tf32x3" if device.type == "cuda" else "ieee"


@triton.jit
def log_decay_of(a, dt_bias, A_log):
    """log a_t = -exp(A_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    softplus = tl.where(
        x > _SOFTPLUS_LINEAR, x, tl.log(1.0 + tl.exp(tl.minimum(x, _SOFTPLUS_LINEAR)))
    )
    return -tl.exp(A_log) * softplus


@triton.jit
def sigmoid_of(b):
    """Written out: exp is what both back ends have."""
    return 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def inverse_norm(rows):
    """1 / |row|, epsilon inside the root as in vLLM's kernels."""
    wide = rows.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + _NORM_EPSILON)


@triton.jit
def dot_exact_right(left, right, total, PARTS: tl.constexpr):
    """total + left @ right: left is fp32, split into PARTS numbers of right's 16-bit type."""
    first = left.to(right.dtype)
    rest = left - first.to(tl.float32)
    second = rest.to(right.dtype)
    if PARTS == 3:
        third = (rest - second.to(tl.float32)).to(right.dtype)
        total = tl.dot(third, right, total)
    total = tl.dot(second, right, total)
    return tl.dot(first, right, total)


@triton.jit
def dot_exact_left(left, right, total):
    """total + left @ right: right is fp32, split into two numbers of left's 16-bit type."""
    first = right.to(left.dtype)
    second = (right - first.to(tl.float32)).to(left.dtype)
    total = tl.dot(left, second, total)
    return tl.dot(left, first, total)


@triton.jit
def dot_fp32(left, right, PRECISION: tl.constexpr):
    """left @ right, both fp32. "bf16x3" keeps 16 bits, for a state that has 8 itself."""
    if PRECISION == "bf16x3":
        left_high = left.to(tl.bfloat16)
        left_low = (left - left_high.to(tl.float32)).to(tl.bfloat16)
        right_high = right.to(tl.bfloat16)
        right_low = (right - right_high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(left_low, right_high)
        total = tl.dot(left_high, right_low, total)
        total = tl.dot(left_high, right_high, total)
    else:
        total = tl.dot(left, right, input_precision=PRECISION)
    return total


@triton.jit
def dot_state(state, rows):
    """state @ rows^T. rows are exactly bf16, so three parts of an fp32 state lose nothing."""
    if state.dtype == tl.float32:
        total = tl.zeros((state.shape[0], rows.shape[0]), dtype=tl.float32)
        total = dot_exact_right(state, tl.trans(rows), total, 3)
    else:
        total = tl.dot(state, tl.trans(rows))
    return total


@triton.jit
def pick_head(table, head, HEADS: tl.constexpr):
    """Row `head` of a [HEADS, ...] table that lies in registers."""
    lane = tl.arange(0, HEADS)
    if len(table.shape) == 2:
        chosen = tl.where(lane[:, None] == head, table, 0.0)
    else:
        chosen = tl.where(lane[:, None, None] == head, table, 0.0)
    return tl.sum(chosen, axis=0)


@triton.jit
def load_rows(q_ptr, k_ptr, q_row, k_row, head, row, num_rows, DK: tl.constexpr, T: tl.constexpr):
    """[K; Q] of key head `head`, T rows each, zero past `num_rows`; head and row are vectors."""
    t = row % T
    channel = tl.arange(0, DK)
    key = k_ptr + t * k_row + head * DK
    query = q_ptr + t * q_row + head * DK
    live = t < num_rows
    # Two loads, not one through a choice of pointers: the Ascend compiler crashes on the latter.
    keys = tl.load(key[:, None] + channel[None, :], mask=(live & (row < T))[:, None], other=0.0)
    queries = tl.load(
        query[:, None] + channel[None, :], mask=(live & (row >= T))[:, None], other=0.0
    )
    return tl.where((row < T)[:, None], keys, queries)


@triton.jit
def gram_by_head(rows, keys, KEY_HEADS: tl.constexpr, X: tl.constexpr, T: tl.constexpr):
    """x_i . k_j within each key head, [KEY_HEADS, X, T], as blocks of one matrix product."""
    product = tl.reshape(tl.dot(rows, tl.trans(keys)), (KEY_HEADS, X, KEY_HEADS, T))
    lane = tl.arange(0, KEY_HEADS)
    same = lane[:, None, None, None] == lane[None, None, :, None]
    return tl.sum(tl.where(same, product, 0.0), axis=2)


@triton.jit
def by_value_head(table, HEADS: tl.constexpr):
    """[key heads, ...] -> [HEADS, ...]: every value head of a group gets its key head's row."""
    KEY_HEADS: tl.constexpr = table.shape[0]
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    ROWS: tl.constexpr = table.shape[1]
    if len(table.shape) == 2:
        wide = tl.broadcast_to(table[:, None, :], (KEY_HEADS, GROUP, ROWS))
        wide = tl.reshape(wide, (HEADS, ROWS))
    else:
        COLUMNS: tl.constexpr = table.shape[2]
        wide = tl.broadcast_to(table[:, None, :, :], (KEY_HEADS, GROUP, ROWS, COLUMNS))
        wide = tl.reshape(wide, (HEADS, ROWS, COLUMNS))
    return wide


@triton.jit
def invert_systems(coupling, log_decay, num_rows, X: tl.constexpr, T: tl.constexpr):
    """Inverse of each head's unit lower triangular system, [heads, X, X], Q columns zero.

    coupling: [heads, X, T], -b k_i.k_j in the rows of K and q_i.k_j in the rows of Q, no decay.
    Column j eliminates row j from all later rows. The decay from j to i is exp of a sum over the
    rows between: the difference of two running sums would lose the digits of a weak decay that
    follows a strong one.
    """
    row = tl.arange(0, X)
    t = row % T
    source = tl.arange(0, T)
    inverse = tl.where((row[:, None] == row[None, :]) & (row < T)[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(inverse[None, :, :], (coupling.shape[0], X, X))
    for j in range(0, num_rows):
        between = (source[None, :] > j) & (source[None, :] <= t[:, None])
        decay = tl.exp(tl.sum(tl.where(between[None, :, :], log_decay[:, None, :], 0.0), axis=2))
        column = tl.sum(tl.where(source[None, None, :] == j, coupling, 0.0), axis=2)
        later = (t > j) | ((row >= T) & (t == j))
        column = tl.where(later[None, :], column * decay, 0.0)
        pivot = tl.sum(tl.where(row[None, :, None] == j, inverse, 0.0), axis=1)
        inverse += column[:, :, None] * pivot[:, None, :]
    return inverse


@triton.jit
def prepare_heads(
    q_base,
    k_base,
    a_base,
    b_base,
    A_log_ptr,
    dt_bias_ptr,
    q_row,
    k_row,
    gate_row,
    first_head,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    T: tl.constexpr,
):
    """Gates, norms and solved systems of HEADS value heads of one request.

    Returns, with X = 2 T rows [K; Q]: inverse [HEADS, X, X]; from_start [HEADS, X], decay from the
    step's start times the factor that normalises (and, for Q, scales) a row; beta [HEADS, X];
    log_decay [HEADS, T]; keys [key heads * T, DK] as given; key_norm [key heads, T].
    """
    X: tl.constexpr = 2 * T
    KEY_HEADS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    first_key_head = first_head // GROUP
    head = tl.arange(0, HEADS)[:, None]
    row = tl.arange(0, X)
    t = row % T
    is_query = row >= T
    source = tl.arange(0, T)
    channel = tl.arange(0, DK)

    stacked = tl.arange(0, KEY_HEADS * X)
    rows = load_rows(
        q_base, k_base, q_row, k_row, first_key_head + stacked // X, stacked % X, num_rows, DK, T
    )
    stacked = tl.arange(0, KEY_HEADS * T)
    key_at = (stacked % T) * k_row + (first_key_head + stacked // T) * DK
    keys = tl.load(
        k_base + key_at[:, None] + channel[None, :],
        mask=(stacked % T < num_rows)[:, None],
        other=0.0,
    )
    is_row = (source < num_rows)[None, :]
    a = tl.load(a_base + head + source[None, :] * gate_row, mask=is_row, other=0.0)
    b = tl.load(b_base + head + t[None, :] * gate_row, mask=(t < num_rows)[None, :], other=0.0)
    A_log = tl.load(A_log_ptr + first_head + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + first_head + head).to(tl.float32)

    log_decay = tl.where(is_row, log_decay_of(a.to(tl.float32), dt_bias, A_log), 0.0)
    beta = sigmoid_of(b.to(tl.float32))
    row_norm = tl.reshape(inverse_norm(rows), (KEY_HEADS, X))
    key_norm = tl.reshape(inverse_norm(keys), (KEY_HEADS, T))
    gram = gram_by_head(rows, keys, KEY_HEADS, X, T) * key_norm[:, None, :]
    row_scale = by_value_head(row_norm, HEADS) * tl.where(is_query, scale, 1.0)[None, :]
    row_factor = row_scale * tl.where(is_query[None, :], 1.0, -beta)
    coupling = by_value_head(gram, HEADS) * row_factor[:, :, None]
    inverse = invert_systems(coupling, log_decay, num_rows, X, T)
    so_far = source[None, :] <= t[:, None]
    running = tl.sum(tl.where(so_far[None, :, :], log_decay[:, None, :], 0.0), axis=2)
    return inverse, row_scale * tl.exp(running), beta, log_decay, keys, key_norm
