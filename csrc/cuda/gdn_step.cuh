// A step of one head by one warp, with the state fed from registers (`step_direct`), or from a buffer in
// shared memory that is filled tile by tile (`step_streamed`).
#pragma once

#include "gdn_fold.cuh"

namespace gdn {

// What a half head needs besides its state, asked for before the small system is solved.
template <bool kWide>
struct HalfInputs {
  Values v;
  PendingBlock<kWide> block;

  WARP_FN void load(const Arguments& x, const Work& w) {
    v.load(x, w);
    block.load(x, w, 0);
  }

  // After `load`, of the other half: keys are the head's.
  WARP_FN void load_half(const Arguments& x, const Work& w) {
    v.load(x, w);
    block.load_updates(x, w, 0);
  }
};

// A half head at work: its results, tile by tile.
template <bool kWide>
struct HalfHead {
  const Prepared<kWide>& head;
  const Values v;
  const Right<kWide> inverse, carry;
  float y[kTiles][2][4];
  Results<kWide> results;

  WARP_FN HalfHead(const Arguments& x, const Work& w, const Prepared<kWide>& prepared,
                   const FirstWeights<kWide>& weights, HalfInputs<kWide>& inputs)
      : head(prepared), v(inputs.v), inverse(prepared.system.inverse),
        carry(prepared.system.carry), y{} {
    apply_pending<kWide>(x, w, head, weights, inputs.block, y);
  }

  WARP_FN void finish(const StateTile<kWide>& state, int tile) {
    finish_tile(state, tile, head.rows, head.system, head.from_state, inverse, carry, v, y[tile],
                results);
  }
};

template <bool kWide>
WARP_FN void fold_if_due(const Arguments& x, const Work& w, const Pending& pending) {
  if (w.flush != 0 && w.pending > 0) fold<kWide>(x, w, pending);
}

// A head by one warp, its halves in turn. kDepth tiles are asked for before anything else is done, and
// kept in flight.
template <bool kWide, int kDepth>
WARP_FN void step_direct(const Arguments& x, int head) {
  constexpr int kHalves = 2, kHalfBytes = kHalf * kDim * StateTile<kWide>::kStateBytes;
  Work w(x, kHalves * head);
  if (w.num_rows == 0) return;
  const char* const state_at = head_state<kWide>(x, w);
  StateTile<kWide> ahead[kDepth];
#pragma unroll
  for (int tile = 0; tile < kDepth; ++tile) ahead[tile].load_stream(tile_rows<kWide>(state_at, tile));
  const HeadInputs<kWide> head_inputs(x, w);
  HalfInputs<kWide> inputs;
  inputs.load(x, w);
  const Prepared<kWide> prepared(x, w, head_inputs);
  const FirstWeights<kWide> weights(w, prepared, inputs.block);
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    w.half = half;
    if (half > 0) inputs.load_half(x, w);
    HalfHead<kWide> work(x, w, prepared, weights, inputs);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      work.finish(ahead[tile % kDepth], tile);
      const int next = tile + kDepth;
      if (next < kTiles || half + 1 < kHalves)
        ahead[tile % kDepth].load_stream(
            tile_rows<kWide>(state_at + (half + next / kTiles) * kHalfBytes, next % kTiles));
    }
    store_results<kWide>(x, w, work.results);
  }
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    w.half = half;
    fold_if_due<kWide>(x, w, prepared.pending);
  }
}

// Half a head's tiles in shared memory, tile by tile refilled while they are used.
template <bool kWide>
struct Stream {
  static constexpr int kTileBytes = StateTile<kWide>::kPieces * kPieceBytes;
  static constexpr int kBytes = kTiles * kTileBytes;
  const char* const state_at;
  char* const buffer;

  WARP_FN void copy(int half, int tile) const {
    const int half_bytes = kHalf * kDim * StateTile<kWide>::kStateBytes;
    copy_tile<kWide>(buffer + tile * kTileBytes,
                     tile_rows<kWide>(state_at + half * half_bytes, tile));
  }

  // Half 0, of a head that is not in the buffer yet.
  WARP_FN void begin() const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy(0, tile);
      warp::end_group();
    }
  }

  // Every tile that is taken is followed by one end_group, so that the one to wait for is known.
  WARP_FN void take(int tile, StateTile<kWide>& state) const {
    warp::wait_groups<kTiles - 1>();
    state.take(buffer + tile * kTileBytes);
  }
};

// Half 1 as it lies in the buffer, half 0 copied behind it.
template <bool kWide>
WARP_FN void fold_streamed(const Arguments& x, const Work& w, const Pending& pending,
                           const Stream<kWide>& stream) {
  const float decay = expf(pending.total);
#pragma unroll 1
  for (int half = 1; half >= 0; --half)
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      StateTile<kWide> state;
      stream.take(tile, state);
      fold_quarters<kWide, kQuarters>(
          x, w, state, 0, half * kHalf + 8 * (warp::lane() >> 2) + 2 * tile, decay,
          [&](int row) { return warp::shuffle(pending.weight, row & 31); });
      if (half > 0) stream.copy(0, tile);
      warp::end_group();
    }
}

// A head by one warp, its halves in turn, as `step_direct`, but with half a head asked for ahead: it
// waits in shared memory, which is larger than the registers.
template <bool kWide>
WARP_FN void step_streamed(const Arguments& x, char* buffer, int head) {
  Work w(x, 2 * head);
  if (w.num_rows == 0) return;
  const Stream<kWide> stream{head_state<kWide>(x, w), buffer};
  stream.begin();
  const HeadInputs<kWide> head_inputs(x, w);
  HalfInputs<kWide> inputs;
  inputs.load(x, w);
  const Prepared<kWide> prepared(x, w, head_inputs);
  const FirstWeights<kWide> weights(w, prepared, inputs.block);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    HalfHead<kWide> work(x, w, prepared, weights, inputs);
    if (half == 0) {  // before the tiles, so that nothing waits for it behind them
      w.half = 1;
      inputs.load_half(x, w);
      w.half = 0;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      warp::keep_order();  // or the compiler holds several tiles in registers
      StateTile<kWide> state;
      stream.take(tile, state);
      work.finish(state, tile);
      if (half == 0) stream.copy(1, tile);
      warp::end_group();
    }
    store_results<kWide>(x, w, work.results);
    w.half = 1;
  }
  if (w.flush != 0 && w.pending > 0) fold_streamed<kWide>(x, w, prepared.pending, stream);
}

}  // namespace gdn
