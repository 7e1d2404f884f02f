// A tile of a head in the pipeline, bf16: K and Q are the left operand, state rows the right one.
//
// A right operand's registers are neighbouring words of one state row, as a load of 16 bytes leaves them;
// a left one's are of two rows in turn, so that words move between load and product. A lane then has
// token g, at 2 c and 8 + 2 c of the tile's rows and the next ones: one address for outputs, one for
// updates.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

template <>
struct HeadParts<false> {
  const uint4 factors, solved;

  WARP_FN explicit HeadParts(const SolvedHead<false>& head)
      : factors(head.factors.of[warp::lane() >> 2]), solved(head.solved[warp::lane()]) {}
};

template <>
struct TileInputs<false> {
  float pending[2][4] = {};  // [dv's last bit]: on K, then on Q
  uint32_t v[2] = {};

  WARP_FN TileInputs(const SolvedHead<false>& head, const HeadRows<false>& rows, const Work& w,
                     int tile) {
    const int lane = warp::lane(), g = lane >> 2, c = lane & 3, first = 16 * tile + 2 * c;
    if (g < w.num_rows)
      v[0] = warp::load4(rows.v.at(g, first)), v[1] = warp::load4(rows.v.at(g, first + 8));
#pragma unroll 1
    for (int block = 0; block < w.pending; block += 8) {
      uint32_t u[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = block + 2 * c + e, dv = StateRows<false>::lane_row(tile);
        u[e] = row < w.pending ? warp::load4(rows.updates.at(row, dv)) : 0;
      }
      const uint4 on = head.weights[block / 8][lane];  // K, its rest, Q, its rest
      const uint32_t low = warp::lows(u[0], u[1]), high = warp::highs(u[0], u[1]);
      warp::mma_fp16(pending[0], on.x, on.z, on.y, on.w, low, low);
      warp::mma_fp16(pending[1], on.x, on.z, on.y, on.w, high, high);
    }
  }
};

// y: products of K and of Q with state rows of which dv's last bit is `odd`.
// [updates; outputs] = [0; Y_Q] + [inverse; carry] beta (V - Y_K).
WARP_FN void apply_system(const HeadParts<false>& head, const TileInputs<false>& inputs, int odd,
                          const float (&y)[4], float (&result)[4]) {
  const float on_k = warp::as_float(head.factors.x), on_q = warp::as_float(head.factors.y);
  float right[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float value = odd ? warp::bf16_high(inputs.v[e]) : warp::bf16_low(inputs.v[e]);
    right[e] = warp::as_float(head.factors.z) * (value - (y[e] * on_k + inputs.pending[odd][e]));
    result[e] = 0.0f;
    result[2 + e] = y[2 + e] * on_q + inputs.pending[odd][2 + e];
  }
  const uint32_t high = warp::pack_bf16(right[0], right[1]);
  const uint32_t rest =
      warp::pack_bf16(right[0] - warp::bf16_low(high), right[1] - warp::bf16_high(high));
  const uint4& s = head.solved;  // inverse, its rest, carry, its rest
  const uint32_t by_token = warp::transpose(high), rest_by_token = warp::transpose(rest);
  warp::mma_bf16(result, s.y, s.w, by_token);
  warp::mma_bf16(result, s.x, s.z, s.x, s.z, by_token, rest_by_token);
}

// result[dv's last bit]: updates at 2 c and 8 + 2 c, then outputs. Two lanes exchange a pair each, so
// that a store has 8 bytes, and a token's 32 are one sector.
WARP_FN void store_tile(const Arguments& x, const Work& w, int tile, const float (&result)[2][4]) {
  const int lane = warp::lane(), g = lane >> 2, c = lane & 3;
  uint32_t out[2], update[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    out[e] = warp::pack_bf16(result[0][2 + e], result[1][2 + e]);
    update[e] = warp::pack_fp16(warp::clamp_half(result[0][e]), warp::clamp_half(result[1][e]));
  }
  const bool upper = c & 1;
  const uint32_t o = warp::shuffle_pair(upper ? out[0] : out[1]);
  const uint32_t u = warp::shuffle_pair(upper ? update[0] : update[1]);
  if (g >= w.num_rows) return;
  const int first = 16 * tile + (upper ? 8 : 0) + 2 * (c & 2);
  warp::store8(x.out + (w.begin + g) * x.out_row + w.head * kDim + first,
               upper ? uint2{o, out[1]} : uint2{out[0], o});
  warp::store8(update_of<false>(x, w, w.place(x, w.pending + g), first),
               upper ? uint2{u, update[1]} : uint2{update[0], u});
}

// Sums of even and of odd steps apart: a product waits for the one before it.
WARP_FN void multiply_tile(const Arguments& x, const Work& w, int tile,
                           const StateTile<false>& state, const Rows& rows,
                           const HeadParts<false>& head, const TileInputs<false>& inputs) {
  float y[2][4] = {}, later[2][4] = {}, result[2][4];
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      warp::mma_bf16(s & 1 ? later[j] : y[j], rows.k[2 * s], rows.q[2 * s], rows.k[2 * s + 1],
                     rows.q[2 * s + 1], state.row[j][2 * s], state.row[j][2 * s + 1]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    add(y[j], later[j]);
    apply_system(head, inputs, j, y[j], result[j]);
  }
  store_tile(x, w, tile, result);
}

}  // namespace gdn
