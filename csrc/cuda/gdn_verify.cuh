// Verification in the replay layout: one warp serves half a value head (64 rows of dv) of a request.
//
// Contract and mathematics: kernels/gdn_verify/replay.py, replay_naive.py. The state goes from memory
// straight into the fragments of the matrix unit; nothing is exchanged between warps.
#pragma once

#include "gdn_work.cuh"

namespace gdn {

WARP_FN void clear(uint32_t (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = 0;
}

// What the value heads of a key head share, as it lies in memory.
template <bool kWide>
struct KeyInputs {
  Rows rows;
  float key_norm;  // of pending row `lane`

  WARP_FN KeyInputs(const Arguments& x, const Work& w) {
    const int lane = warp::lane(), g = lane >> 2;
    clear(rows.k), clear(rows.q);
    if (g < w.num_rows) {
      StateTile<kWide>::load_channels(x.k + (w.begin + g) * x.k_row + w.key_head * kDim, rows.k);
      StateTile<kWide>::load_channels(x.q + (w.begin + g) * x.q_row + w.key_head * kDim, rows.q);
    }
    key_norm = lane < w.pending
                   ? x.key_norm[w.slot * x.norm_slot + w.key_head * x.ring_rows + w.place(x, lane)]
                   : 0.0f;
  }
};

// What a value head's gates and decays are made of, as it lies in memory: converted where it is used, so
// that all of it is asked for in one trip.
struct GateInputs {
  uint16_t a, b, dt_bias[2];  // of row lane % 8; the bias in halves
  bool real;
  float A_log, log_decay;  // the decay of pending row `lane`

  WARP_FN GateInputs(const Arguments& x, const Work& w) {
    const int lane = warp::lane(), row = lane & 7;
    const int64_t at = (w.begin + row) * x.gate_row + w.head;
    real = row < w.num_rows;
    a = real ? x.a[at] : uint16_t{0};
    b = real ? x.b[at] : uint16_t{0};
    const uint16_t* bias = static_cast<const uint16_t*>(x.dt_bias);
    dt_bias[0] = x.dt_bias_is_bf16 ? uint16_t{0} : bias[2 * w.head];
    dt_bias[1] = bias[x.dt_bias_is_bf16 ? w.head : 2 * w.head + 1];
    A_log = x.A_log[w.head];
    log_decay =
        lane < w.pending
            ? x.log_decay[w.slot * x.decay_slot + w.head * x.ring_rows + w.place(x, lane)]
            : 0.0f;
  }

  WARP_FN Gates gates() const {
    const uint32_t bias = static_cast<uint32_t>(dt_bias[1]) << 16 | dt_bias[0];
    return gates_of(warp::bf16_low(a), warp::bf16_low(b), warp::as_float(bias), A_log, real);
  }
};

// What a head needs besides its state and its values.
template <bool kWide>
struct HeadInputs {
  KeyInputs<kWide> key;
  GateInputs gate;

  WARP_FN HeadInputs(const Arguments& x, const Work& w) : key(x, w), gate(x, w) {}
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
    float products[4] = {};
    multiply_rows(rows, keys, products);
    get(products, pending, first, weights);
  }

  // With the products of K and Q with those keys.
  WARP_FN void get(const float (&products)[4], const Pending& pending, int first,
                   float (&weights)[4]) const {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      weights[n] = products[n] * (factor[n >> 1] *
                                  warp::shuffle(pending.weight, (first + 2 * c + (n & 1)) & 31));
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
      : rows(in.key.rows) {
    const Gates gates[1] = {in.gate.gates()};
    pending = pending_of(in.gate.log_decay, in.key.key_norm);
    products = products_of(rows, x.scale);
    System systems[1];
    solve(products, gates, w.num_rows, systems);
    system = systems[0];
    append<kWide>(x, w, rows, products, gates[0]);
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
    const float for_k[2] = {weights[0], weights[1]}, for_q[2] = {weights[2], weights[3]};
    const UpdateWeights<kWide> on_k(for_k), on_q(for_q);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      block.updates.apply(tile, y[tile][0], on_k);
      block.updates.apply(tile, y[tile][1], on_q);
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
