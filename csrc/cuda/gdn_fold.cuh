// Folding pending rows into the committed state: S := c_p S + sum_j w_j u_j k_j^T.
#pragma once

#include "gdn_verify.cuh"

namespace gdn {

constexpr int kQuarters = 4;  // of a state's channels: 32 each, the unit in which a fold can be cut

// Accumulators of some quarters of one tile: 16 rows of dv, in the order in which StateTile holds a
// row.
template <bool kWide, int kCount>
struct FoldTile;

template <int kCount>
struct FoldTile<false, kCount> {
  float sum[4 * kCount][4];

  WARP_FN void begin(const StateTile<false>& state, int first, float decay) {
#pragma unroll
    for (int m = 0; m < 4 * kCount; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[m][2 * r] = warp::bf16_low(state.row[r][4 * first + m]) * decay;
        sum[m][2 * r + 1] = warp::bf16_high(state.row[r][4 * first + m]) * decay;
      }
  }

  // u: rows 2 c and 2 c + 1 of the block, weighted; keys[e]: channels of those rows that column
  // g of each product needs, i.e. the run that lanes with c = g / 2 hold.
  WARP_FN void add(const float (&u)[4], const uint32_t (&keys)[2][4 * kCount]) {
    const bool odd = (warp::lane() >> 2) & 1;
    const uint32_t h0 = warp::pack_bf16(u[0], u[1]), h1 = warp::pack_bf16(u[2], u[3]);
    const uint32_t r0 = warp::pack_bf16(u[0] - warp::bf16_low(h0), u[1] - warp::bf16_high(h0));
    const uint32_t r1 = warp::pack_bf16(u[2] - warp::bf16_low(h1), u[3] - warp::bf16_high(h1));
#pragma unroll
    for (int m = 0; m < 4 * kCount; ++m) {
      const uint32_t key =
          odd ? warp::highs(keys[0][m], keys[1][m]) : warp::lows(keys[0][m], keys[1][m]);
      warp::mma_bf16(sum[m], h0, h1, r0, r1, key, key);
    }
  }

  WARP_FN void store(char* rows_at, int first) const {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = warp::pack_bf16(sum[4 * i + n][2 * r], sum[4 * i + n][2 * r + 1]);
        warp::store16(rows_at + r * (kDim * 2) + 64 * (first + i) + 16 * c,
                      uint4{x[0], x[1], x[2], x[3]});
      }
  }

  // The runs of 8 channels that lane (g, c) multiplies: those of column pair g / 2.
  WARP_FN static void load_keys(const uint16_t* row_at, int first, uint32_t (&x)[4 * kCount]) {
    const int pair = warp::lane() >> 3;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 part = warp::load16(row_at + 32 * (first + i) + 8 * pair);
      x[4 * i] = part.x, x[4 * i + 1] = part.y, x[4 * i + 2] = part.z, x[4 * i + 3] = part.w;
    }
  }
};

template <int kCount>
struct FoldTile<true, kCount> {
  float sum[4 * kCount][4];

  WARP_FN void begin(const StateTile<true>& state, int first, float decay) {
#pragma unroll
    for (int m = 0; m < 4 * kCount; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        sum[m][n] = state.row[n >> 1][2 * (4 * first + m) + (n & 1)] * decay;
  }

  WARP_FN void add(const float (&u)[4], const uint32_t (&keys)[2][4 * kCount]) {
    const bool odd = (warp::lane() >> 2) & 1;
    float h[4], r[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      h[n] = warp::tf32_head(u[n]);
      r[n] = u[n] - h[n];
    }
#pragma unroll
    for (int m = 0; m < 4 * kCount; ++m) {
      const float k0 = odd ? warp::bf16_high(keys[0][m]) : warp::bf16_low(keys[0][m]);
      const float k1 = odd ? warp::bf16_high(keys[1][m]) : warp::bf16_low(keys[1][m]);
      warp::mma_tf32(sum[m], r[0], r[2], r[1], r[3], k0, k1);
      warp::mma_tf32(sum[m], h[0], h[2], h[1], h[3], k0, k1);
    }
  }

  WARP_FN void store(char* rows_at, int first) const {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 2 * kCount; ++i) {
        const float *x = sum[2 * i] + 2 * r, *y = sum[2 * i + 1] + 2 * r;
        warp::store16(rows_at + r * (kDim * 4) + 64 * (2 * first + i) + 16 * c,
                      uint4{warp::as_bits(x[0]), warp::as_bits(x[1]), warp::as_bits(y[0]),
                            warp::as_bits(y[1])});
      }
  }

  WARP_FN static void load_keys(const uint16_t* row_at, int first, uint32_t (&x)[4 * kCount]) {
    const int pair = warp::lane() >> 3;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const uint2 part = warp::load8(row_at + 16 * (2 * first + i) + 4 * pair);
      x[2 * i] = part.x, x[2 * i + 1] = part.y;
    }
  }
};

// A pending row's update in the lane's two rows of a tile, which `at` is the first of.
template <bool kWide>
WARP_FN void load_updates(const char* at, bool real, float (&u)[2]) {
  u[0] = u[1] = 0.0f;
  if (!real) return;
  if (kWide) {
    const uint2 pair = warp::load8(at);
    u[0] = warp::as_float(pair.x), u[1] = warp::as_float(pair.y);
  } else {
    const uint32_t pair = warp::load4(at);
    u[0] = warp::fp16_low(pair), u[1] = warp::fp16_high(pair);
  }
}

// kCount quarters of a tile, from `first` on. dv: the lane's first row of it, of the head.
// weight_of(row): 1 / |k| times the decay after a pending row, for all lanes at once.
template <bool kWide, int kCount, typename WeightOf>
WARP_FN void fold_quarters(const Arguments& x, const Work& w, const StateTile<kWide>& state,
                           int first, int dv, float decay, WeightOf weight_of) {
  const int c = warp::lane() & 3;
  FoldTile<kWide, kCount> folded;
  folded.begin(state, first, decay);
#pragma unroll 1
  for (int block = 0; block < w.pending; block += 8) {
    uint32_t keys[2][4 * kCount];
    float u[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = block + 2 * c + e, place = w.place(x, row);
      const float weight = weight_of(row);
      const bool real = row < w.pending;
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) keys[e][i] = 0;
      if (real) FoldTile<kWide, kCount>::load_keys(key_at(x, w, place), first, keys[e]);
      float own[2];
      load_updates<kWide>(update_of<kWide>(x, w, place, dv), real, own);
      u[e] = own[0] * weight, u[2 + e] = own[1] * weight;
    }
    folded.add(u, keys);
  }
  folded.store(head_state<kWide>(x, w) + dv * (kDim * StateTile<kWide>::kStateBytes), first);
}

// Half a head. The state comes out of L2, where the step that precedes a fold has just brought it.
template <bool kWide>
WARP_FN void fold(const Arguments& x, const Work& w, const Pending& pending) {
  const float decay = expf(pending.total);
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    const int dv = w.half * kHalf + 8 * (warp::lane() >> 2) + 2 * tile;
    StateTile<kWide> state;
    state.load_stream(head_state<kWide>(x, w) + dv * (kDim * StateTile<kWide>::kStateBytes));
    fold_quarters<kWide, kQuarters>(
        x, w, state, 0, dv, decay, [&](int row) { return warp::shuffle(pending.weight, row & 31); });
  }
}

}  // namespace gdn
