// Shared memory of the pipeline: three rings, for states, for what a head's updates and v are, and for
// solved systems.
#pragma once

#include "gdn_fold.cuh"
#include "gdn_heads.cuh"
#include "gdn_layouts.cuh"

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

// What one value head has in a record.
template <bool kWide>
struct SolvedHead {
  uint4 solved[32];                // inverse, carry
  uint4 weights[kMostBlocks][32];  // of eight pending rows on K, then on Q
  TokenFactors<kWide> factors;
  float after[kRing];              // Pending::weight
  uint4 decay;                     // of all pending rows, its first word
};

// What the warps that multiply need of kHeads value heads of a key head, each lane's part where the
// lane finds it in one load.
template <bool kWide, int kHeads>
struct Record {
  KeyRows<kWide> rows;
  int work[8];  // `put`; no rows: there are no more heads
  SolvedHead<kWide> heads[kHeads];

  WARP_FN void put(const Work& w) {
    const int all[8] = {static_cast<int>(w.begin), static_cast<int>(w.slot), w.num_rows, w.start,
                        w.pending,                 w.flush,                  w.head,     w.key_head};
    const int lane = warp::lane();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (lane == i) work[i] = all[i];
  }

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

// What a multiplying warp needs of a head, beside K and Q, for all of its tiles. This, TileInputs and
// `multiply_tile` are there twice, for each side that state rows are on: gdn_state_left.cuh,
// gdn_state_right.cuh.
template <bool kWide>
struct HeadParts;

// What belongs to 16 rows of dv of a head, beside their state: v, and what pending rows add.
template <bool kWide>
struct TileInputs;

// How a pipeline is cut. A unit is kHeadsOfUnit value heads of a key head, whose systems one warp
// solves. A head's state takes kParts stages; a warp that multiplies has kTilesOfWarp tiles of a head
// in turn, and with more than one only every kGroups-th head.
template <bool kWide, int kSystemWarpCount, int kStageCount, int kPartsOfHead, int kTilesOfWarpCount,
          int kRowPlaceCount, int kUnitHeads>
struct PipelineShared {
  static constexpr int kSystemWarps = kSystemWarpCount, kStages = kStageCount;
  static constexpr int kRowPlaces = kRowPlaceCount, kHeadsOfUnit = kUnitHeads;
  static constexpr int kTilesOfWarp = kTilesOfWarpCount, kGroups = kTilesOfWarp;
  static constexpr int kWarpsOfHead = kTilesOfHead / kTilesOfWarp;
  static constexpr int kParts = kPartsOfHead, kTilesOfPart = kTilesOfHead / kParts;
  static constexpr int kWarpsOfPart = kWarpsOfHead / kParts;
  static constexpr int kWarps = kTileWarps + kSystemWarps + 1;
  // A wait names a phase by its parity alone, so that a warp may pass by none of a barrier: every use of
  // a stage is for the same warps, and every warp that multiplies takes part in every record and in
  // every place of rows.
  static_assert(kStages % (kParts * kGroups) == 0, "a stage is always of the same part and group");
  static constexpr int kGroupsOfPart = 16 * kTilesOfPart / StateRows<kWide>::kRowsOfGroup;
  static_assert(kGroupsOfPart > 0, "a part has whole groups");
  static constexpr int kStageBytes = kGroupsOfPart * StateRows<kWide>::kGroupStride;
  // At a block's start all warps wait for the first record. So requests are asked for while barriers are
  // made, and states once the first unit's inputs are here: behind the states of all blocks they would
  // come late. Timed for bf16 alone.
  static constexpr bool kSystemsFirst = !kWide;

  uint4 stages[kStages][kStageBytes / 16];
  HeadRows<kWide> rows[kRowPlaces];
  Record<kWide, kUnitHeads> records[kSystemWarps];
  uint64_t state_full[kStages], state_empty[kStages];
  uint64_t rows_full[kRowPlaces], rows_empty[kRowPlaces];
  uint64_t record_full[kSystemWarps], record_empty[kSystemWarps];
  uint64_t inputs_here;  // of the block's first unit; one phase

  WARP_FN void make_barriers() {
    for (int i = 0; i < kStages; ++i) {
      warp::make_barrier(state_full + i, 1);
      warp::make_barrier(state_empty + i, kWarpsOfPart);
    }
    for (int i = 0; i < kRowPlaces; ++i) {
      warp::make_barrier(rows_full + i, 32);
      warp::make_barrier(rows_empty + i, kTileWarps);
    }
    for (int i = 0; i < kSystemWarps; ++i) {
      warp::make_barrier(record_full + i, 1);
      warp::make_barrier(record_empty + i, kTileWarps);
    }
    if (kSystemsFirst) warp::make_barrier(&inputs_here, 1);
    warp::barriers_made();
  }
};

}  // namespace gdn
