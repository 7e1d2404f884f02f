// A tile of a head, from what lies in shared memory. In fp32 state rows are the left operand of the matrix
// unit, as everywhere; in bf16 the pipeline has them on the right.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

// What a warp needs of a head, beside K and Q, for all of its tiles.
template <bool kWide>
struct HeadParts {
  System system;  // its beta
  float from_state[2][2];
  const Right<kWide> inverse, carry;

  WARP_FN explicit HeadParts(const SolvedHead& head)
      : HeadParts(head, head.solved[warp::lane()]) {}

  WARP_FN HeadParts(const SolvedHead& head, uint4 solved)
      : inverse(uint2{solved.x, solved.y}), carry(uint2{solved.z, solved.w}) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint4 token = head.token[2 * c + e];
      from_state[0][e] = warp::as_float(token.x), from_state[1][e] = warp::as_float(token.y);
      system.beta[e] = warp::as_float(token.z);
    }
  }
};

// What belongs to 16 rows of dv of a head, beside their state; the lane's are dv and dv + 1.
template <bool kWide>
struct TileInputs {
  float pending[2][4] = {};
  Values v;  // tile 0 of it

  WARP_FN TileInputs(const SolvedHead& head, const HeadRows<kWide>& rows, const Work& w, int dv) {
    const int lane = warp::lane(), c = lane & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      v.x[e][0] = 2 * c + e < w.num_rows ? warp::load4(rows.v.at(2 * c + e, dv)) : 0;
#pragma unroll 1
    for (int block = 0; block < w.pending; block += 8) {
      Updates<kWide> updates;  // tile 0 of it
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = block + 2 * c + e;
        updates.load_pair(e, rows.updates.at(row, dv), row < w.pending);
      }
      const uint4 bits = head.weights[block / 8][lane];
      updates.apply(0, pending[0], UpdateWeights<kWide>(uint2{bits.x, bits.y}));
      updates.apply(0, pending[1], UpdateWeights<kWide>(uint2{bits.z, bits.w}));
    }
  }
};

template <bool kWide>
WARP_FN void multiply_tile(const Arguments& x, const Work& w, int dv, const StateTile<kWide>& state,
                           const Rows& rows, const HeadParts<kWide>& head,
                           const TileInputs<kWide>& inputs) {
  const int c = warp::lane() & 3;
  Results<kWide> results;  // tile 0 of it
  finish_tile(state, 0, rows, head.system, head.from_state, head.inverse, head.carry, inputs.v,
              inputs.pending, results);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * c + e;
    if (row >= w.num_rows) continue;
    warp::store4(x.out + (w.begin + row) * x.out_row + w.head * kDim + dv, results.out[e][0]);
    results.store_pair(e, update_of<kWide>(x, w, w.place(x, w.pending + row), dv));
  }
}

// K and Q are the left operand, state rows the right one, whose registers are neighbouring words of one
// row, as a load of 16 bytes leaves them: no word moves between the load and the product. The lane then has
// token g, at dv 2 c and 8 + 2 c of the tile and their next ones: one address for outputs, one for updates.
struct ExchangedTile {
  const int tile, lane = warp::lane(), g = lane >> 2, c = lane & 3;
  float result[2][4] = {};  // [dv's last bit]: updates at dv 2 c and 8 + 2 c, then outputs
  uint32_t v[2] = {};

  WARP_FN explicit ExchangedTile(int which) : tile(which) {}

  // The lane's first row of the state; the next one is its second.
  WARP_FN int state_row() const { return StateRows<false>::lane_row(tile); }

  // What pending rows add to the products, and v.
  WARP_FN void load(const Work& w, const SolvedHead& head, const HeadRows<false>& rows,
                    float (&pending)[2][4]) {
    const int dv = 16 * tile + 2 * c;
    if (g < w.num_rows)
      v[0] = warp::load4(rows.v.at(g, dv)), v[1] = warp::load4(rows.v.at(g, dv + 8));
#pragma unroll 1
    for (int block = 0; block < w.pending; block += 8) {
      uint32_t u[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = block + 2 * c + e;
        u[e] = row < w.pending ? warp::load4(rows.updates.at(row, state_row())) : 0;
      }
      const uint4 on = head.weights[block / 8][lane];  // K, its rest, Q, its rest
      const uint32_t low = warp::lows(u[0], u[1]), high = warp::highs(u[0], u[1]);
      warp::mma_fp16(pending[0], on.x, on.z, on.y, on.w, low, low);
      warp::mma_fp16(pending[1], on.x, on.z, on.y, on.w, high, high);
    }
  }

  // token, solved: the lane's of SolvedHead.
  WARP_FN void multiply(const StateTile<false>& state, const Rows& rows, uint4 token, uint4 solved,
                        const float (&pending)[2][4]) {
    float y[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        warp::mma_bf16(s & 1 ? odd[j] : y[j], rows.k[2 * s], rows.q[2 * s], rows.k[2 * s + 1],
                       rows.q[2 * s + 1], state.row[j][2 * s], state.row[j][2 * s + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      add(y[j], odd[j]);
      finish(j, y[j], token, solved, pending[j]);
    }
  }

  // [updates; outputs] = [0; Y_Q] + [inverse; carry] beta (V - Y_K).
  WARP_FN void finish(int j, const float (&y)[4], uint4 token, uint4 solved,
                      const float (&pending)[4]) {
    const float from_k = warp::as_float(token.x), from_q = warp::as_float(token.y);
    float right[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float value = j ? warp::bf16_high(v[e]) : warp::bf16_low(v[e]);
      right[e] = warp::as_float(token.z) * (value - (y[e] * from_k + pending[e]));
      result[j][2 + e] = y[2 + e] * from_q + pending[2 + e];
    }
    const uint32_t head = warp::pack_bf16(right[0], right[1]);
    const uint32_t rest =
        warp::pack_bf16(right[0] - warp::bf16_low(head), right[1] - warp::bf16_high(head));
    const uint32_t by_token = warp::transpose(head), rest_by_token = warp::transpose(rest);
    warp::mma_bf16(result[j], solved.y, solved.w, by_token);
    warp::mma_bf16(result[j], solved.x, solved.z, solved.x, solved.z, by_token, rest_by_token);
  }

  // Two lanes exchange a pair each, so that a store has 8 bytes, and a token's 32 one sector.
  WARP_FN void store(const Arguments& x, const Work& w) const {
    uint32_t out[2], update[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      out[e] = warp::pack_bf16(result[0][2 + e], result[1][2 + e]);
      update[e] =
          warp::pack_fp16(warp::clamp_half(result[0][e]), warp::clamp_half(result[1][e]));
    }
    const bool upper = c & 1;
    const uint32_t o = warp::shuffle(upper ? out[0] : out[1], lane ^ 1);
    const uint32_t u = warp::shuffle(upper ? update[0] : update[1], lane ^ 1);
    if (g < w.num_rows) {
      const int dv = 16 * tile + 8 * (c & 1) + 2 * (c & 2);
      warp::store8(x.out + (w.begin + g) * x.out_row + w.head * kDim + dv,
                   upper ? uint2{o, out[1]} : uint2{out[0], o});
      warp::store8(update_of<false>(x, w, w.place(x, w.pending + g), dv),
                   upper ? uint2{u, update[1]} : uint2{update[0], u});
    }
  }
};

}  // namespace gdn
