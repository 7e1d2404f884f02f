// Shared memory of the pipeline: three rings, for states, for what a head's updates and v are, and for
// solved systems.
#pragma once

#include "gdn_fold.cuh"
#include "gdn_heads.cuh"

namespace gdn {

constexpr int kTilesOfHead = kDim / 16, kTileWarps = 8;
constexpr int kMostBlocks = kRing / 8;  // of eight pending rows

// Rows of dv numbers, 16 bytes apart from a multiple of 128, so that lanes that read the same numbers
// of different rows use different banks.
template <int kRowCount, int kNumberBytes>
struct RowTable {
  static constexpr int kRowBytes = kDim * kNumberBytes + 16;
  uint4 words[kRowCount * kRowBytes / 16];

  WARP_FN const char* at(int row, int dv) const {
    return reinterpret_cast<const char*>(words) + row * kRowBytes + dv * kNumberBytes;
  }

  WARP_FN char* at(int row, int dv) {
    return reinterpret_cast<char*>(words) + row * kRowBytes + dv * kNumberBytes;
  }
};

// A state's rows in groups of eight. In fp32 a group begins 64 bytes behind the one before: two lanes that
// read the same channels, of rows eight apart, use different banks. In bf16 they meet, which costs nothing
// that was measured, and a copy may have more than one group.
template <bool kWide>
struct StateRows {
  static constexpr int kRowBytes = kDim * StateTile<kWide>::kStateBytes;
  static constexpr int kGroupBytes = 8 * kRowBytes, kGroupStride = kGroupBytes + (kWide ? 64 : 0);

  // The lane's first row of a tile, of the head; the next one is its second.
  WARP_FN static int lane_row(int tile) {
    const int g = warp::lane() >> 2;
    return 16 * tile + 8 * (g & 1) + 2 * (g >> 1);
  }

  WARP_FN static int offset(int row) { return row / 8 * kGroupStride + row % 8 * kRowBytes; }
};

// What one value head has in a record.
struct SolvedHead {
  uint4 solved[32];                // inverse, carry
  uint4 weights[kMostBlocks][32];  // of eight pending rows on K, then on Q
  uint4 token[kRows];              // decay and norm on what the state gives K, and Q; beta
  float after[kRing];              // Pending::weight
  uint4 decay;                     // of all pending rows, its first word
};

// What the warps that multiply need of kHeads value heads of a key head, each lane's part where the
// lane finds it in one load.
template <int kHeads>
struct Record {
  uint4 rows[8][32];  // K and Q, `put_rows`
  int work[9];        // `put`; no rows: there are no more heads
  SolvedHead heads[kHeads];

  // As left operands of the matrix unit, eight rows of K above eight of Q.
  WARP_FN void put_rows(const Rows& x) {
#pragma unroll
    for (int s = 0; s < 8; ++s)
      rows[s][warp::lane()] = uint4{x.k[2 * s], x.q[2 * s], x.k[2 * s + 1], x.q[2 * s + 1]};
  }

  WARP_FN Rows get_rows() const {
    Rows x;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint4 part = rows[s][warp::lane()];
      x.k[2 * s] = part.x, x.q[2 * s] = part.y, x.k[2 * s + 1] = part.z, x.q[2 * s + 1] = part.w;
    }
    return x;
  }

  // count: of the value heads that it has, from w's on.
  WARP_FN void put(const Work& w, int count) {
    const int all[9] = {static_cast<int>(w.begin), static_cast<int>(w.slot), w.num_rows,
                        w.start, w.pending, w.flush, w.head, w.key_head, count};
    const int lane = warp::lane();
#pragma unroll
    for (int i = 0; i < 9; ++i)
      if (lane == i) work[i] = all[i];
  }

  WARP_FN int count() const { return kHeads == 1 ? 1 : work[8]; }

  WARP_FN Work get() const {
    Request r;
    r.begin = work[0], r.slot = work[1], r.num_rows = work[2], r.start = work[3];
    r.pending = work[4], r.flush = work[5];
    return Work(r, work[6], work[7]);
  }
};

// A head's rows of dv as they lie in memory; what is behind its rows is old.
template <bool kWide>
struct HeadRows {
  RowTable<kRows, 2> v;
  RowTable<kRing, StateTile<kWide>::kUpdateBytes> updates;  // of pending rows, in their order
};

// How a pipeline is cut. A unit is kHeadsOfUnit value heads of a key head, whose systems one warp
// solves. A head's state takes kParts stages; a warp that multiplies has kTilesOfWarp tiles of a head
// in turn, and with more than one only every kGroups-th head. A stage is filled by kCopyCount copies. The
// first kSingles units are of one head each.
template <bool kWide, int kSystemWarpCount, int kStageCount, int kPartsOfHead, int kTilesOfWarpCount,
          int kRowPlaceCount, int kCopyWarpCount, int kCopyCount, int kSingles, int kUnitHeads>
struct PipelineShared {
  static constexpr int kSystemWarps = kSystemWarpCount, kStages = kStageCount;
  static constexpr int kRowPlaces = kRowPlaceCount, kHeadsOfUnit = kUnitHeads;
  static_assert(kSingles % 2 == 0, "whole pairs");
  using BlockUnits = Units<kUnitHeads, kSingles>;
  static constexpr int kTilesOfWarp = kTilesOfWarpCount, kGroups = kTilesOfWarp;
  static constexpr int kWarpsOfHead = kTilesOfHead / kTilesOfWarp;
  static constexpr int kParts = kPartsOfHead, kTilesOfPart = kTilesOfHead / kParts;
  static constexpr int kWarpsOfPart = kWarpsOfHead / kParts;
  static constexpr int kCopyWarps = kCopyWarpCount;
  static constexpr int kWarps = kTileWarps + kSystemWarps + kCopyWarps;
  // A wait names a phase by its parity alone, so that a warp may pass by none of a barrier: every use of
  // a stage is for the same warps, and every warp that multiplies takes part in every record and in
  // every place of rows.
  static_assert(kStages % (kParts * kGroups) == 0, "a stage is always of the same part and group");
  static constexpr int kGroupsOfPart = 2 * kTilesOfPart;
  static constexpr int kGroupsOfCopy = kGroupsOfPart / kCopyCount;
  static_assert(kGroupsOfPart % kCopyCount == 0, "copies of one size");
  static_assert(kGroupsOfCopy == 1 || StateRows<kWide>::kGroupStride == StateRows<kWide>::kGroupBytes,
                "a copy has no gaps");
  static constexpr int kStageBytes = kGroupsOfPart * StateRows<kWide>::kGroupStride;

  uint4 stages[kStages][kStageBytes / 16];
  HeadRows<kWide> rows[kRowPlaces];
  Record<kUnitHeads> records[kSystemWarps];
  uint64_t state_full[kStages], state_empty[kStages];
  uint64_t rows_full[kRowPlaces], rows_empty[kRowPlaces];
  uint64_t record_full[kSystemWarps], record_empty[kSystemWarps];

  // By a warp, each lane some: one after another they take a microsecond.
  WARP_FN void make_barriers() {
    const int lane = warp::lane();
    static_assert(kStages <= 32 && kRowPlaces <= 32 && kSystemWarps <= 32, "a lane each");
    if (lane < kStages) {
      warp::make_barrier(state_full + lane, 1);
      warp::make_barrier(state_empty + lane, kWarpsOfPart);
    }
    if (lane < kRowPlaces) {
      warp::make_barrier(rows_full + lane, 32);
      warp::make_barrier(rows_empty + lane, kTileWarps);
    }
    if (lane < kSystemWarps) {
      warp::make_barrier(record_full + lane, 1);
      warp::make_barrier(record_empty + lane, kTileWarps);
    }
    warp::barriers_made();
  }
};

}  // namespace gdn
