// A tile of a head in the pipeline, fp32: state rows are the left operand, as in the other forms.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

template <>
struct HeadParts<true> {
  System system;  // its beta
  float from_state[2][2];
  const Right<true> inverse, carry;

  WARP_FN explicit HeadParts(const SolvedHead<true>& head)
      : HeadParts(head, head.solved[warp::lane()]) {}

  WARP_FN HeadParts(const SolvedHead<true>& head, uint4 solved)
      : inverse(uint2{solved.x, solved.y}), carry(uint2{solved.z, solved.w}) {
    const int c = warp::lane() & 3;
    const uint4 from = head.factors.from_state[c];
    from_state[0][0] = warp::as_float(from.x), from_state[0][1] = warp::as_float(from.y);
    from_state[1][0] = warp::as_float(from.z), from_state[1][1] = warp::as_float(from.w);
    const uint2 beta = head.factors.beta[c];
    system.beta[0] = warp::as_float(beta.x), system.beta[1] = warp::as_float(beta.y);
  }
};

// The lane's rows of dv are the two of its state.
template <>
struct TileInputs<true> {
  float pending[2][4] = {};
  Values v;  // tile 0 of it

  WARP_FN TileInputs(const SolvedHead<true>& head, const HeadRows<true>& rows, const Work& w,
                     int tile) {
    const int lane = warp::lane(), c = lane & 3, dv = StateRows<true>::lane_row(tile);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      v.x[e][0] = 2 * c + e < w.num_rows ? warp::load4(rows.v.at(2 * c + e, dv)) : 0;
#pragma unroll 1
    for (int block = 0; block < w.pending; block += 8) {
      Updates<true> updates;  // tile 0 of it
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = block + 2 * c + e;
        updates.load_pair(e, rows.updates.at(row, dv), row < w.pending);
      }
      const uint4 bits = head.weights[block / 8][lane];
      updates.apply(0, pending[0], UpdateWeights<true>(uint2{bits.x, bits.y}));
      updates.apply(0, pending[1], UpdateWeights<true>(uint2{bits.z, bits.w}));
    }
  }
};

WARP_FN void multiply_tile(const Arguments& x, const Work& w, int tile,
                           const StateTile<true>& state, const Rows& rows,
                           const HeadParts<true>& head, const TileInputs<true>& inputs) {
  const int c = warp::lane() & 3, dv = StateRows<true>::lane_row(tile);
  Results<true> results;  // tile 0 of it
  finish_tile(state, 0, rows, head.system, head.from_state, head.inverse, head.carry, inputs.v,
              inputs.pending, results);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * c + e;
    if (row >= w.num_rows) continue;
    warp::store4(x.out + (w.begin + row) * x.out_row + w.head * kDim + dv, results.out[e][0]);
    results.store_pair(e, update_of<true>(x, w, w.place(x, w.pending + row), dv));
  }
}

}  // namespace gdn
