// Verification in the replay layout: one warp serves half a value head (64 rows of dv) of a request.
//
// Contract and mathematics: kernels/gdn_verify/replay.py, replay_naive.py. The state goes from memory
// straight into the fragments of the matrix unit; nothing is exchanged between warps.
#pragma once

#include "gdn_tile.cuh"

namespace gdn {

struct Arguments {
  const uint16_t *q, *k, *v, *a, *b;  // bf16
  const float *A_log;
  const void* dt_bias;
  const int *query_start_loc, *slots, *start, *pending, *flush;
  char* state;
  uint16_t* keys;  // bf16
  char* updates;
  float *log_decay, *key_norm;
  uint16_t* out;  // bf16
  int64_t q_row, k_row, v_row, gate_row, out_row;
  int64_t state_slot, key_slot, update_slot, decay_slot, norm_slot;
  int32_t requests, value_heads, group, ring_rows, dt_bias_is_bf16;
  float scale;
};

// A request's part of a step. Without rows or with the null slot, num_rows is 0.
struct Request {
  int begin = 0, slot = 0, num_rows = 0, start = 0, pending = 0, flush = 0;

  WARP_FN Request() {}

  // All in one trip to memory, which takes a microsecond under load.
  WARP_FN Request(const Arguments& x, int request) {
    slot = warp::load_now(x.slots + request);
    begin = warp::load_now(x.query_start_loc + request);
    const int end = warp::load_now(x.query_start_loc + request + 1);
    start = warp::load_now(x.start + request);
    pending = warp::load_now(x.pending + request);
    flush = warp::load_now(x.flush + request);
    // Always so, of the last three; but what a branch on num_rows does not need, the compiler asks
    // for behind it.
    constexpr int kNever = -2147483647;
    const bool live = slot > 0 && end > begin && (start | pending) >= 0 && flush != kNever;
    num_rows = live ? (end - begin < kRows ? end - begin : kRows) : 0;
  }
};

// What a warp works on.
struct Work {
  int64_t begin, slot;
  int num_rows, start, pending, flush, head, key_head, half;

  WARP_FN Work(const Arguments& x, int unit)
      : Work(x, Request(x, (unit >> 1) / x.value_heads), (unit >> 1) % x.value_heads, unit & 1) {}

  WARP_FN Work(const Arguments& x, const Request& request, int which_head, int which_half)
      : begin(request.begin), slot(request.slot), num_rows(request.num_rows), start(request.start),
        pending(request.pending), flush(request.flush), head(which_head),
        key_head(which_head / x.group), half(which_half) {}

  // row < W, and for a row that is used start + row < 2 W.
  WARP_FN int place(const Arguments& x, int row) const {
    const int at = start + row;
    return at < x.ring_rows ? at : at - x.ring_rows;
  }
};

template <bool kWide>
WARP_FN char* head_state(const Arguments& x, const Work& w) {
  return x.state + (w.slot * x.state_slot + w.head * (kDim * kDim)) * StateTile<kWide>::kStateBytes;
}

template <bool kWide>
WARP_FN char* half_state(const Arguments& x, const Work& w) {
  return head_state<kWide>(x, w) + w.half * (kHalf * kDim * StateTile<kWide>::kStateBytes);
}

// The lane's two rows of a tile, in a half head that begins at half_at.
template <bool kWide, typename At>
WARP_FN At tile_rows(At half_at, int tile) {
  return half_at + (8 * (warp::lane() >> 2) + 2 * tile) * (kDim * StateTile<kWide>::kStateBytes);
}

// The update of a row of the ring, from row dv of the head on.
template <bool kWide>
WARP_FN char* update_of(const Arguments& x, const Work& w, int place, int dv) {
  return x.updates +
         (w.slot * x.update_slot + (w.head * x.ring_rows + place) * kDim + dv) *
             StateTile<kWide>::kUpdateBytes;
}

template <bool kWide>
WARP_FN char* update_at(const Arguments& x, const Work& w, int place) {
  return update_of<kWide>(x, w, place, w.half * kHalf + 8 * (warp::lane() >> 2));
}

WARP_FN uint16_t* key_at(const Arguments& x, const Work& w, int place) {
  return x.keys + w.slot * x.key_slot + (w.key_head * x.ring_rows + place) * kDim;
}

WARP_FN void clear(uint32_t (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = 0;
}

// What a head needs besides its state and its values, as it lies in memory.
template <bool kWide>
struct HeadInputs {
  Rows rows;
  float a, b, dt_bias, A_log;  // of row lane % 8
  float log_decay, key_norm;   // of pending row `lane`

  WARP_FN HeadInputs(const Arguments& x, const Work& w) {
    const int lane = warp::lane(), g = lane >> 2, row = lane & 7;
    clear(rows.k), clear(rows.q);
    if (g < w.num_rows) {
      StateTile<kWide>::load_channels(x.k + (w.begin + g) * x.k_row + w.key_head * kDim, rows.k);
      StateTile<kWide>::load_channels(x.q + (w.begin + g) * x.q_row + w.key_head * kDim, rows.q);
    }
    const int64_t at = (w.begin + row) * x.gate_row + w.head;
    a = row < w.num_rows ? warp::bf16_low(x.a[at]) : 0.0f;
    b = row < w.num_rows ? warp::bf16_low(x.b[at]) : 0.0f;
    dt_bias = x.dt_bias_is_bf16 ? warp::bf16_low(static_cast<const uint16_t*>(x.dt_bias)[w.head])
                                : static_cast<const float*>(x.dt_bias)[w.head];
    A_log = x.A_log[w.head];
    const bool pends = lane < w.pending;
    const int place = w.place(x, lane);
    log_decay =
        pends ? x.log_decay[w.slot * x.decay_slot + w.head * x.ring_rows + place] : 0.0f;
    key_norm =
        pends ? x.key_norm[w.slot * x.norm_slot + w.key_head * x.ring_rows + place] : 0.0f;
  }
};

// Append the rows of this step, except their updates. They lie behind the pending rows, so no warp
// overwrites what another one reads; one warp of a head (of a key head) writes what its warps share.
template <bool kWide>
WARP_FN void append(const Arguments& x, const Work& w, const Rows& rows, const Products& p,
                    const Gates& gates) {
  if (w.half != 0) return;
  const int lane = warp::lane(), g = lane >> 2, c = lane & 3;
  if (lane < w.num_rows)
    x.log_decay[w.slot * x.decay_slot + w.head * x.ring_rows + w.place(x, w.pending + lane)] =
        gates.log_decay;
  if (w.key_head * x.group != w.head || g >= w.num_rows) return;
  const int place = w.place(x, w.pending + g);
  if (c == 0)
    x.key_norm[w.slot * x.norm_slot + w.key_head * x.ring_rows + place] = p.k_norm;
  StateTile<kWide>::store_channels(key_at(x, w, place), rows.k);
}

// The key of pending row first + g.
template <bool kWide>
WARP_FN void load_pending_keys(const Arguments& x, const Work& w, int first, uint32_t (&keys)[16]) {
  const int row = first + (warp::lane() >> 2);
  clear(keys);
  if (row < w.pending) StateTile<kWide>::load_channels(key_at(x, w, w.place(x, row)), keys);
}

// How much pending rows add to the products with K and Q.
struct PendingWeights {
  float factor[2];

  WARP_FN PendingWeights(const Products& p, const System& s) {
    const float from_start = expf(s.running);
    factor[0] = p.k_norm * from_start, factor[1] = p.q_norm * from_start;
  }

  // Of the eight rows from `first` on, whose keys these are: on K, then on Q.
  WARP_FN void get(const Rows& rows, const uint32_t* keys, const Pending& pending, int first,
                   float (&weights)[4]) const {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int n = 0; n < 4; ++n) weights[n] = 0.0f;
    multiply_rows(rows, keys, weights);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      weights[n] *= factor[n >> 1] * warp::shuffle(pending.weight, (first + 2 * c + (n & 1)) & 31);
  }
};

// All that a warp knows of a head before it needs the state.
template <bool kWide>
struct Prepared {
  const Rows& rows;
  Products products;
  Pending pending;
  System system;
  float from_state[2][2];

  WARP_FN Prepared(const Arguments& x, const Work& w, const HeadInputs<kWide>& in)
      : rows(in.rows) {
    const Gates gates =
        gates_of(in.a, in.b, in.dt_bias, in.A_log, (warp::lane() & 7) < w.num_rows);
    pending = pending_of(in.log_decay, in.key_norm);
    products = products_of(rows, x.scale);
    system = solve(products, gates, w.num_rows);
    append<kWide>(x, w, rows, products, gates);
    const float decay = expf(pending.total);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      from_state[0][e] = system.from_start_k[e] * decay;
      from_state[1][e] = system.from_start_q[e] * decay;
    }
  }
};

// Eight pending rows: the key of row g, and the updates of rows 2 c and 2 c + 1.
template <bool kWide>
struct PendingBlock {
  uint32_t keys[16];
  Updates<kWide> updates;

  WARP_FN void load(const Arguments& x, const Work& w, int first) {
    load_pending_keys<kWide>(x, w, first, keys);
    load_updates(x, w, first);
  }

  WARP_FN void load_updates(const Arguments& x, const Work& w, int first) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = first + 2 * c + e;
      updates.load(e, update_at<kWide>(x, w, w.place(x, row)), row < w.pending);
    }
  }
};

// Weights of a head's first eight pending rows, which its halves share.
template <bool kWide>
struct FirstWeights {
  const PendingWeights of;
  float first[4] = {};

  WARP_FN FirstWeights(const Work& w, const Prepared<kWide>& head, const PendingBlock<kWide>& block)
      : of(head.products, head.system) {
    if (w.pending > 0) of.get(head.rows, block.keys, head.pending, 0, first);
  }
};

// The part of Y = X S^T that pending rows add to the committed state, per tile: K, then Q.
// `block` holds the first eight rows.
template <bool kWide>
WARP_FN void apply_pending(const Arguments& x, const Work& w, const Prepared<kWide>& head,
                           const FirstWeights<kWide>& weights_of, PendingBlock<kWide>& block,
                           float (&y)[kTiles][2][4]) {
  for (int first = 0; first < w.pending; first += 8) {
    float weights[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) weights[n] = weights_of.first[n];
    if (first > 0) {
      block.load(x, w, first);
      weights_of.of.get(head.rows, block.keys, head.pending, first, weights);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      block.updates.apply(tile, y[tile][0], weights);
      block.updates.apply(tile, y[tile][1], weights + 2);
    }
  }
}

// v of the lane's two rows t = 2 c, 2 c + 1 in its 8 rows of dv.
struct Values {
  uint32_t x[2][kTiles];

  WARP_FN void load(const Arguments& arguments, const Work& w) {
    const int g = warp::lane() >> 2, c = warp::lane() & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * c + e;
      uint4 part = {0, 0, 0, 0};
      if (row < w.num_rows)
        part = warp::load16(arguments.v + (w.begin + row) * arguments.v_row + w.head * kDim +
                            w.half * kHalf + 8 * g);
      x[e][0] = part.x, x[e][1] = part.y, x[e][2] = part.z, x[e][3] = part.w;
    }
  }
};

// Outputs and updates of two rows t, gathered over the tiles so that each store has 16 bytes.
template <bool kWide>
struct Results;

template <>
struct Results<false> {
  uint32_t out[2][kTiles], updates[2][kTiles];

  WARP_FN void keep_updates(int tile, const float (&u)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      updates[e][tile] = warp::pack_fp16(warp::clamp_half(u[e]), warp::clamp_half(u[2 + e]));
  }

  // Of tile 0.
  WARP_FN void store_pair(int row, char* at) const { warp::store4(at, updates[row][0]); }

  WARP_FN void store_updates(int row, char* at) const {
    warp::store16(at, uint4{updates[row][0], updates[row][1], updates[row][2], updates[row][3]});
  }
};

template <>
struct Results<true> {
  uint32_t out[2][kTiles];
  float updates[2][2 * kTiles];

  WARP_FN void keep_updates(int tile, const float (&u)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) updates[e][2 * tile] = u[e], updates[e][2 * tile + 1] = u[2 + e];
  }

  WARP_FN void store_pair(int row, char* at) const {
    warp::store8(at, uint2{warp::as_bits(updates[row][0]), warp::as_bits(updates[row][1])});
  }

  WARP_FN void store_updates(int row, char* at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = updates[row] + 4 * i;
      warp::store16(at + 16 * i, uint4{warp::as_bits(x[0]), warp::as_bits(x[1]),
                                       warp::as_bits(x[2]), warp::as_bits(x[3])});
    }
  }
};

template <bool kWide>
WARP_FN void store_results(const Arguments& x, const Work& w, const Results<kWide>& results) {
  const int g = warp::lane() >> 2, c = warp::lane() & 3;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * c + e;
    if (row >= w.num_rows) continue;
    const uint32_t* o = results.out[e];
    warp::store16(x.out + (w.begin + row) * x.out_row + w.head * kDim + w.half * kHalf + 8 * g,
                  uint4{o[0], o[1], o[2], o[3]});
    results.store_updates(e, update_at<kWide>(x, w, w.place(x, w.pending + row)));
  }
}

// One tile: products with the state, the solved system, outputs and updates.
template <bool kWide>
WARP_FN void finish_tile(const StateTile<kWide>& state, int tile, const Rows& rows, const System& s,
                         const float (&from_state)[2][2], const Right<kWide>& inverse,
                         const Right<kWide>& carry, const Values& v, const float (&pending)[2][4],
                         Results<kWide>& results) {
  float y_k[4] = {}, y_q[4] = {}, right[4], updates[4] = {};
  state.multiply(rows, y_k, y_q);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int e = n & 1;
    const uint32_t pair = v.x[e][tile];
    const float value = n < 2 ? warp::bf16_low(pair) : warp::bf16_high(pair);
    right[n] = s.beta[e] * (value - (y_k[n] * from_state[0][e] + pending[0][n]));
    y_q[n] = y_q[n] * from_state[1][e] + pending[1][n];
  }
  multiply_small(updates, right, inverse);
  multiply_small(y_q, right, carry);
  results.out[0][tile] = warp::pack_bf16(y_q[0], y_q[2]);
  results.out[1][tile] = warp::pack_bf16(y_q[1], y_q[3]);
  results.keep_updates(tile, updates);
}

}  // namespace gdn
