// A tile of a state, 16 rows of dv, as left operand of the matrix unit (the pipeline has bf16 on the
// right, gdn_state_right.cuh); bf16 or fp32.
//
// Lane 4 g + c holds two rows of a tile: 8 g + 2 i and the next one, for tile i of a half head. So
// a lane's rows over the four tiles of a half head are 8 consecutive numbers of dv, and v, outputs
// and updates move 16 bytes at a time.
#pragma once

#include "gdn_system.cuh"

namespace gdn {

constexpr int kHalf = 64;   // rows of dv that a warp serves
constexpr int kTiles = 4;   // of 16 rows each

constexpr int kPieceBytes = 32 * 16;  // of a tile: what a lane's load of 16 bytes has of a warp

template <bool kWide>
struct StateTile;

WARP_FN void add(float (&x)[4], const float (&y)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] += y[n];
}

// bf16 state: chunk i of a row is channels 32 i + 8 c .. + 7.
template <>
struct StateTile<false> {
  static constexpr int kStateBytes = 2, kUpdateBytes = 2;
  static constexpr int kPiecesOfRow = 4, kPieces = 2 * kPiecesOfRow;
  uint32_t row[2][16];

  WARP_FN static void load_channels(const uint16_t* row_at, uint32_t (&x)[16]) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 part = warp::load16(row_at + 32 * i + 8 * c);
      x[4 * i] = part.x, x[4 * i + 1] = part.y, x[4 * i + 2] = part.z, x[4 * i + 3] = part.w;
    }
  }

  WARP_FN static void store_channels(uint16_t* row_at, const uint32_t (&x)[16]) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      warp::store16(row_at + 32 * i + 8 * c,
                    uint4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
  }

  WARP_FN void set_chunk(int r, int i, uint4 part) {
    row[r][4 * i] = part.x, row[r][4 * i + 1] = part.y;
    row[r][4 * i + 2] = part.z, row[r][4 * i + 3] = part.w;
  }

  // From device memory; rows_at: the first of the lane's two rows.
  WARP_FN void load_stream(const char* rows_at) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        set_chunk(r, i, warp::load_stream(rows_at + r * (kDim * kStateBytes) + 16 * c + 64 * i));
  }

  // From shared memory, where rows follow each other without a gap, so that all begin in one bank. Of
  // the two rows that a quarter of a warp reads together, lanes of the odd one take the chunks of each
  // 128 bytes in the other order: the quarter reads all banks once.
  WARP_FN void load_shared(const char* rows_at) {
    const int c = warp::lane() & 3;
    const bool crossed = (warp::lane() >> 2) & 1;
    const int first = crossed ? 64 : 0, second = crossed ? 0 : 64;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* at = rows_at + r * (kDim * kStateBytes) + 16 * c;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint4 a = warp::load16(at + 64 * i + first);
        const uint4 b = warp::load16(at + 64 * i + second);
        set_chunk(r, i, select(crossed, b, a)), set_chunk(r, i + 1, select(crossed, a, b));
      }
    }
  }

  WARP_FN static uint4 select(bool first, const uint4& a, const uint4& b) {
    return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
  }

  // What `copy_tile` left in a slot, which has arrived.
  WARP_FN void take(const char* slot) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 part = warp::load16(slot + piece * kPieceBytes + 16 * warp::lane());
      set_chunk(piece / kPiecesOfRow, piece % kPiecesOfRow, part);
    }
  }

  // Sums of even and of odd steps apart: a product waits for the one before it.
  WARP_FN void multiply(const Rows& rows, float (&with_k)[4], float (&with_q)[4]) const {
    float odd_k[4] = {}, odd_q[4] = {};
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint32_t a0 = row[0][2 * s], a1 = row[1][2 * s];
      const uint32_t a2 = row[0][2 * s + 1], a3 = row[1][2 * s + 1];
      warp::mma_bf16(s & 1 ? odd_k : with_k, a0, a1, a2, a3, rows.k[2 * s], rows.k[2 * s + 1]);
      warp::mma_bf16(s & 1 ? odd_q : with_q, a0, a1, a2, a3, rows.q[2 * s], rows.q[2 * s + 1]);
    }
    add(with_k, odd_k), add(with_q, odd_q);
  }
};

// fp32 state: chunk i of a row is channels 16 i + 4 c .. + 3. Rows of K and Q are exactly tf32, so
// a state in two tf32 parts (truncated, the rest) gives products to 2^-23.
template <>
struct StateTile<true> {
  static constexpr int kStateBytes = 4, kUpdateBytes = 4;
  static constexpr int kPiecesOfRow = 8, kPieces = 2 * kPiecesOfRow;
  float row[2][32];

  WARP_FN static void load_channels(const uint16_t* row_at, uint32_t (&x)[16]) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 part = warp::load8(row_at + 16 * i + 4 * c);
      x[2 * i] = part.x, x[2 * i + 1] = part.y;
    }
  }

  WARP_FN static void store_channels(uint16_t* row_at, const uint32_t (&x)[16]) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      warp::store8(row_at + 16 * i + 4 * c, uint2{x[2 * i], x[2 * i + 1]});
  }

  WARP_FN void load_stream(const char* rows_at) {
    load(rows_at, [](const char* at) { return warp::load_stream(at); });
  }

  WARP_FN void load_shared(const char* rows_at) {
    load(rows_at, [](const char* at) { return warp::load16(at); });
  }

  template <typename Load16>
  WARP_FN void load(const char* rows_at, Load16 load16) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* at = rows_at + r * (kDim * kStateBytes) + 16 * c;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 part = load16(at + 64 * i);
        row[r][4 * i] = warp::as_float(part.x), row[r][4 * i + 1] = warp::as_float(part.y);
        row[r][4 * i + 2] = warp::as_float(part.z), row[r][4 * i + 3] = warp::as_float(part.w);
      }
    }
  }

  WARP_FN void take(const char* slot) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 part = warp::load16(slot + piece * kPieceBytes + 16 * warp::lane());
      float* to = row[piece / kPiecesOfRow] + 4 * (piece % kPiecesOfRow);
      to[0] = warp::as_float(part.x), to[1] = warp::as_float(part.y);
      to[2] = warp::as_float(part.z), to[3] = warp::as_float(part.w);
    }
  }

  WARP_FN void multiply(const Rows& rows, float (&with_k)[4], float (&with_q)[4]) const {
    float rest_k[4] = {}, rest_q[4] = {};
#pragma unroll
    for (int s = 0; s < 16; ++s) {
      const float x0 = row[0][2 * s], x1 = row[1][2 * s];
      const float x2 = row[0][2 * s + 1], x3 = row[1][2 * s + 1];
      const float h0 = warp::tf32_head(x0), h1 = warp::tf32_head(x1);
      const float h2 = warp::tf32_head(x2), h3 = warp::tf32_head(x3);
      const float k0 = warp::bf16_low(rows.k[s]), k1 = warp::bf16_high(rows.k[s]);
      const float q0 = warp::bf16_low(rows.q[s]), q1 = warp::bf16_high(rows.q[s]);
      warp::mma_tf32(rest_k, x0 - h0, x1 - h1, x2 - h2, x3 - h3, k0, k1);
      warp::mma_tf32(rest_q, x0 - h0, x1 - h1, x2 - h2, x3 - h3, q0, q1);
      warp::mma_tf32(with_k, h0, h1, h2, h3, k0, k1);
      warp::mma_tf32(with_q, h0, h1, h2, h3, q0, q1);
    }
    add(with_k, rest_k), add(with_q, rest_q);
  }
};

// The lane's part of a tile on its way into a slot of shared memory, laid out as the lane takes it from
// there: no other lane waits for it, and no two lanes meet in a bank.
template <bool kWide>
WARP_FN void copy_tile(char* slot, const char* rows_at) {
  using Tile = StateTile<kWide>;
  rows_at += 16 * (warp::lane() & 3), slot += 16 * warp::lane();
#pragma unroll
  for (int piece = 0; piece < Tile::kPieces; ++piece)
    warp::copy16(slot + piece * kPieceBytes,
                 rows_at + piece / Tile::kPiecesOfRow * (kDim * Tile::kStateBytes) +
                     64 * (piece % Tile::kPiecesOfRow));
}

// Right operand of 8 x 8 numbers, kept in two parts; sums over a lane's two columns.
template <bool kWide>
struct Right;

template <>
struct Right<false> {
  uint32_t head, rest;

  WARP_FN explicit Right(const float (&x)[2]) {
    head = warp::pack_bf16(x[0], x[1]);
    rest = warp::pack_bf16(x[0] - warp::bf16_low(head), x[1] - warp::bf16_high(head));
  }

  // As another warp packed it.
  WARP_FN explicit Right(uint2 packed) : head(packed.x), rest(packed.y) {}

  WARP_FN uint2 packed() const { return {head, rest}; }
};

template <>
struct Right<true> {
  float head[2], rest[2];

  WARP_FN explicit Right(const float (&x)[2]) { set(x); }

  WARP_FN void set(const float (&x)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      head[e] = warp::tf32_head(x[e]);
      rest[e] = x[e] - head[e];
    }
  }

  WARP_FN explicit Right(uint2 packed) {
    const float x[2] = {warp::as_float(packed.x), warp::as_float(packed.y)};
    set(x);
  }

  WARP_FN uint2 packed() const {
    return {warp::as_bits(head[0] + rest[0]), warp::as_bits(head[1] + rest[1])};
  }
};

// c += x right^T, x as an accumulator holds it, [16, 8].
WARP_FN void multiply_small(float (&c)[4], const float (&x)[4], const Right<false>& right) {
  const uint32_t h0 = warp::pack_bf16(x[0], x[1]), h1 = warp::pack_bf16(x[2], x[3]);
  const uint32_t r0 = warp::pack_bf16(x[0] - warp::bf16_low(h0), x[1] - warp::bf16_high(h0));
  const uint32_t r1 = warp::pack_bf16(x[2] - warp::bf16_low(h1), x[3] - warp::bf16_high(h1));
  warp::mma_bf16(c, h0, h1, right.rest);
  warp::mma_bf16(c, h0, h1, r0, r1, right.head, right.head);
}

WARP_FN void multiply_small(float (&c)[4], const float (&x)[4], const Right<true>& right) {
  float h[4], r[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    h[n] = warp::tf32_head(x[n]);
    r[n] = x[n] - h[n];
  }
  warp::mma_tf32(c, h[0], h[2], h[1], h[3], right.rest[0], right.rest[1]);
  warp::mma_tf32(c, r[0], r[2], r[1], r[3], right.head[0], right.head[1]);
  warp::mma_tf32(c, h[0], h[2], h[1], h[3], right.head[0], right.head[1]);
}

// Right operand of products with updates: two weights as an accumulator of [rows of K or Q, 8] holds them.
template <bool kWide>
struct UpdateWeights;

template <>
struct UpdateWeights<false> {
  uint32_t head, rest;  // fp16, as updates are

  WARP_FN explicit UpdateWeights(const float (&x)[2]) {
    head = warp::pack_fp16(x[0], x[1]);
    rest = warp::pack_fp16(x[0] - warp::fp16_low(head), x[1] - warp::fp16_high(head));
  }

  WARP_FN explicit UpdateWeights(uint2 packed) : head(packed.x), rest(packed.y) {}

  WARP_FN uint2 packed() const { return {head, rest}; }
};

template <>
struct UpdateWeights<true> : Right<true> {
  using Right<true>::Right;
};

// Updates of two pending rows, 2 c and 2 c + 1 of a block of 8, in the lane's 8 rows of dv.
template <bool kWide>
struct Updates;

template <>
struct Updates<false> {
  uint32_t x[2][kTiles];

  // Tile 0 alone.
  WARP_FN void load_pair(int row, const char* at, bool real) { x[row][0] = real ? warp::load4(at) : 0; }

  WARP_FN void load(int row, const char* at, bool real) {
    const uint4 part = real ? warp::load16(at) : uint4{0, 0, 0, 0};
    x[row][0] = part.x, x[row][1] = part.y, x[row][2] = part.z, x[row][3] = part.w;
  }

  // c += u^T weights.
  WARP_FN void apply(int tile, float (&c)[4], const UpdateWeights<false>& weights) const {
    const uint32_t a0 = warp::lows(x[0][tile], x[1][tile]);
    const uint32_t a1 = warp::highs(x[0][tile], x[1][tile]);
    warp::mma_fp16(c, a0, a1, a0, a1, weights.head, weights.rest);
  }
};

template <>
struct Updates<true> {
  float x[2][2 * kTiles];

  WARP_FN void load_pair(int row, const char* at, bool real) {
    const uint2 part = real ? warp::load8(at) : uint2{0, 0};
    x[row][0] = warp::as_float(part.x), x[row][1] = warp::as_float(part.y);
  }

  WARP_FN void load(int row, const char* at, bool real) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 part = real ? warp::load16(at + 16 * i) : uint4{0, 0, 0, 0};
      x[row][4 * i] = warp::as_float(part.x), x[row][4 * i + 1] = warp::as_float(part.y);
      x[row][4 * i + 2] = warp::as_float(part.z), x[row][4 * i + 3] = warp::as_float(part.w);
    }
  }

  WARP_FN void apply(int tile, float (&c)[4], const UpdateWeights<true>& weights) const {
    const float u[4] = {x[0][2 * tile], x[1][2 * tile], x[0][2 * tile + 1], x[1][2 * tile + 1]};
    multiply_small(c, u, weights);
  }
};

}  // namespace gdn
