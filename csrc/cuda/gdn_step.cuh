// A step of one work item, with the state fed from registers (`step_direct`) or from a warp's buffer
// in shared memory that a bulk copy fills (`step_copied`).
#pragma once

#include "gdn_fold.cuh"

namespace gdn {

// All that a warp knows before it needs the state.
template <bool kWide>
struct Prepared {
  Rows rows;
  Values v;
  Pending pending;
  System system;
  float y[kTiles][2][4];
  float from_state[2][2];

  WARP_FN Prepared(const Arguments& x, const Work& w)
      : rows(load_rows<kWide>(x, w)), v(x, w), pending(load_pending(x, w)), y{} {
    const Gates gates = load_gates(x, w);
    const Products products = products_of(rows, x.scale);
    system = solve(products, gates, w.num_rows);
    append<kWide>(x, w, rows, products, gates);
    apply_pending<kWide>(x, w, rows, products, system, pending, y);
    const float decay = expf(pending.total);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      from_state[0][e] = system.from_start_k[e] * decay;
      from_state[1][e] = system.from_start_q[e] * decay;
    }
  }

  WARP_FN void finish(const StateTile<kWide>& state, int tile, const Right<kWide>& inverse,
                      const Right<kWide>& carry, Results<kWide>& results) const {
    finish_tile(state, tile, rows, system, from_state, inverse, carry, v, y[tile], results);
  }
};

template <bool kWide>
WARP_FN void fold_if_due(const Arguments& x, const Work& w, const Pending& pending) {
  if (w.flush != 0 && w.pending > 0) fold<kWide>(x, w, pending);
}

// kDepth tiles are asked for before anything else is done, and kept in flight.
template <bool kWide, int kDepth>
WARP_FN void step_direct(const Arguments& x, int unit) {
  const Work w(x, unit);
  if (w.num_rows == 0) return;
  const char* const half_at = half_state<kWide>(x, w);
  StateTile<kWide> ahead[kDepth];
#pragma unroll
  for (int tile = 0; tile < kDepth; ++tile) ahead[tile].template load<true>(half_at, tile);
  const Prepared<kWide> prepared(x, w);
  const Right<kWide> inverse(prepared.system.inverse), carry(prepared.system.carry);
  Results<kWide> results;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    prepared.finish(ahead[tile % kDepth], tile, inverse, carry, results);
    if (tile + kDepth < kTiles) ahead[tile % kDepth].template load<true>(half_at, tile + kDepth);
  }
  store_results<kWide>(x, w, results);
  fold_if_due<kWide>(x, w, prepared.pending);
}

template <bool kWide>
WARP_FN void finish_copied(const Prepared<kWide>& prepared, const char* buffer,
                           Results<kWide>& results) {
  const Right<kWide> inverse(prepared.system.inverse), carry(prepared.system.carry);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    warp::keep_order();  // or the compiler holds several tiles in registers
    StateTile<kWide> state;
    state.template load<false>(buffer, tile);
    prepared.finish(state, tile, inverse, carry, results);
  }
}

// Items first, first + stride, ...; the next item's state is copied as soon as a buffer is free.
template <bool kWide, int kBuffers>
WARP_FN void steps_copied(const Arguments& x, char* buffers, uint64_t* barriers, int first,
                          int stride, int total) {
  constexpr uint32_t kBytes = kHalf * kDim * StateTile<kWide>::kStateBytes;
  if (first >= total) return;
  warp::Copier copier;
  copier.init(barriers, kBuffers);
  Work w(x, first);
  int buffer = 0;
  if (w.num_rows) copier.start(buffer, buffers, half_state<kWide>(x, w), kBytes);
  for (int unit = first; unit < total; unit += stride) {
    // The last turn looks at its own item again rather than past the end.
    const bool more = unit + stride < total;
    const Work next(x, more ? unit + stride : unit);
    const int following = (buffer + 1) % kBuffers;
    const bool copy_next = more && next.num_rows > 0;
    if (kBuffers > 1 && copy_next)
      copier.start(following, buffers + following * kBytes, half_state<kWide>(x, next), kBytes);
    if (w.num_rows) {
      const Prepared<kWide> prepared(x, w);
      Results<kWide> results;
      copier.wait(buffer);
      finish_copied<kWide>(prepared, buffers + buffer * kBytes, results);
      if (kBuffers == 1 && copy_next)
        copier.start(following, buffers, half_state<kWide>(x, next), kBytes);
      store_results<kWide>(x, w, results);
      fold_if_due<kWide>(x, w, prepared.pending);
    } else if (kBuffers == 1 && copy_next) {
      copier.start(following, buffers, half_state<kWide>(x, next), kBytes);
    }
    w = next;
    buffer = following;
  }
}

}  // namespace gdn
