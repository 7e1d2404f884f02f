// How the parts that a multiplying warp reads lie in shared memory, which differs between state types:
// fp32 states are the left operand of the matrix unit (gdn_state_left.cuh), bf16 states the right one
// (gdn_state_right.cuh).
#pragma once

#include "gdn_tile.cuh"

namespace gdn {

// A state's rows in groups, each brought by one bulk copy.
template <bool kWide>
struct StateGroups;

// Few bytes at a time, so that a gap keeps banks apart: two lanes that read the same channels do so of
// rows eight apart.
template <>
struct StateGroups<true> {
  static constexpr int kRowsOfGroup = 8, kGap = 64;
};

// In one copy: sixteen take the copying warp a thousand cycles. A copy has no gaps, so it is the lanes
// that keep out of each other's banks (StateTile<false>::load_shared).
template <>
struct StateGroups<false> {
  static constexpr int kRowsOfGroup = kDim, kGap = 0;
};

template <bool kWide>
struct StateRows : StateGroups<kWide> {
  using StateGroups<kWide>::kRowsOfGroup;
  static constexpr int kRowBytes = kDim * StateTile<kWide>::kStateBytes;
  static constexpr int kGroupBytes = kRowsOfGroup * kRowBytes;
  static constexpr int kGroupStride = kGroupBytes + StateGroups<kWide>::kGap;

  // The lane's first row of a tile, of the head; the next one is its second.
  WARP_FN static int lane_row(int tile) {
    const int g = warp::lane() >> 2;
    return 16 * tile + 8 * (g & 1) + 2 * (g >> 1);
  }

  WARP_FN static int offset(int row) {
    return row / kRowsOfGroup * kGroupStride + row % kRowsOfGroup * kRowBytes;
  }
};

// K and Q of a key head.
template <bool kWide>
struct KeyRows;

// Right operands.
template <>
struct KeyRows<true> {
  uint4 words[8][32];  // K, then Q

  WARP_FN void put(const Rows& rows) {
    const int lane = warp::lane();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t *k = rows.k + 4 * i, *q = rows.q + 4 * i;
      words[i][lane] = uint4{k[0], k[1], k[2], k[3]};
      words[4 + i][lane] = uint4{q[0], q[1], q[2], q[3]};
    }
  }

  WARP_FN void get(Rows& rows) const {
    const int lane = warp::lane();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 k = words[i][lane], q = words[4 + i][lane];
      rows.k[4 * i] = k.x, rows.k[4 * i + 1] = k.y;
      rows.k[4 * i + 2] = k.z, rows.k[4 * i + 3] = k.w;
      rows.q[4 * i] = q.x, rows.q[4 * i + 1] = q.y;
      rows.q[4 * i + 2] = q.z, rows.q[4 * i + 3] = q.w;
    }
  }
};

// Left operands, eight rows of K above eight of Q: a load leaves the four registers of a product.
template <>
struct KeyRows<false> {
  uint4 words[8][32];

  WARP_FN void put(const Rows& x) {
#pragma unroll
    for (int s = 0; s < 8; ++s)
      words[s][warp::lane()] = uint4{x.k[2 * s], x.q[2 * s], x.k[2 * s + 1], x.q[2 * s + 1]};
  }

  WARP_FN void get(Rows& x) const {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint4 part = words[s][warp::lane()];
      x.k[2 * s] = part.x, x.q[2 * s] = part.y, x.k[2 * s + 1] = part.z, x.q[2 * s + 1] = part.w;
    }
  }
};

// What a token's products are multiplied by: on K and on Q the decay and norm of what the state gives,
// and beta.
template <bool kWide>
struct TokenFactors;

// A lane has two tokens: those of its columns.
template <>
struct TokenFactors<true> {
  uint4 from_state[4];
  uint2 beta[4];

  WARP_FN void put(const System& s, float decay) {
    const int lane = warp::lane(), c = lane & 3;
    if (lane != c) return;
    from_state[c] =
        uint4{warp::as_bits(s.from_start_k[0] * decay), warp::as_bits(s.from_start_k[1] * decay),
              warp::as_bits(s.from_start_q[0] * decay), warp::as_bits(s.from_start_q[1] * decay)};
    beta[c] = uint2{warp::as_bits(s.beta[0]), warp::as_bits(s.beta[1])};
  }
};

// A lane has one: that of its row.
template <>
struct TokenFactors<false> {
  uint4 of[kRows];  // on K, on Q, beta

  WARP_FN void put(const System& s, float decay) {
    const int lane = warp::lane(), c = lane & 3;
    if (lane != c) return;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      of[2 * c + e] = uint4{warp::as_bits(s.from_start_k[e] * decay),
                            warp::as_bits(s.from_start_q[e] * decay), warp::as_bits(s.beta[e]), 0};
  }
};

}  // namespace gdn
