// A step by blocks that stay: in each, one warp copies states into a ring of stages, some warps solve
// small systems ahead and gather what belongs to them, and eight warps multiply. Those never read
// device memory: a trip there takes a microsecond, and a head may not take more than one and a half.
// A stage is held only from its copy to its products.
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

// Eight rows of dv numbers on their way from device memory into a table, 16 bytes a lane and load.
template <int kNumberBytes>
struct EightRows {
  static constexpr int kLanesOfRow = kDim * kNumberBytes / 16, kLoads = 8 * kLanesOfRow / 32;
  uint4 part[kLoads];

  WARP_FN static int row(int load) { return (32 * load + warp::lane()) / kLanesOfRow; }

  WARP_FN static int dv() { return warp::lane() % kLanesOfRow * (16 / kNumberBytes); }

  // row_at(row): its address; rows from `count` on are zero.
  template <typename RowAt>
  WARP_FN void load(int count, RowAt row_at) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      part[i] = row(i) < count ? warp::load16(row_at(row(i)) + dv() * kNumberBytes)
                               : uint4{0, 0, 0, 0};
  }

  template <typename Table>
  WARP_FN void store(Table& table, int first) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) warp::store16(table.at(first + row(i), dv()), part[i]);
  }
};

// What the warps that multiply need of a head, each lane's part where the lane finds it in one load.
template <bool kWide>
struct Record {
  uint4 rows[8][32];               // Rows: K, then Q
  uint4 solved[2][32];             // inverse, carry; from_state
  uint2 beta[32];
  uint4 weights[kMostBlocks][32];  // of eight pending rows on K, then on Q
  float after[kRing];              // Pending::weight
  int work[8];                     // `put`; no rows: there are no more heads
  uint4 decay;                     // of all pending rows, its first word
  RowTable<kRows, 2> v;
  RowTable<kRing, StateTile<kWide>::kUpdateBytes> updates;  // of pending rows, in their order

  WARP_FN void put(int begin, int slot, int num_rows, int start, int pending, int flush, int head) {
    const int all[8] = {begin, slot, num_rows, start, pending, flush, head, 0};
    const int lane = warp::lane();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (lane == i) work[i] = all[i];
  }

  WARP_FN Request request() const {
    Request r;
    r.begin = work[0], r.slot = work[1], r.num_rows = work[2], r.start = work[3];
    r.pending = work[4], r.flush = work[5];
    return r;
  }
};

// A head's state takes kPartsOfHead stages. A warp that multiplies has kTilesOfWarpCount tiles of a
// head in turn, and with more than one only every kGroups-th head.
template <bool kWide, int kSystemWarpCount, int kStageCount, int kPartsOfHead, int kTilesOfWarpCount>
struct PipelineShared {
  static constexpr int kSystemWarps = kSystemWarpCount, kStages = kStageCount;
  static constexpr int kTilesOfWarp = kTilesOfWarpCount, kGroups = kTilesOfWarp;
  static constexpr int kWarpsOfHead = kTilesOfHead / kTilesOfWarp;
  static constexpr int kParts = kPartsOfHead, kTilesOfPart = kTilesOfHead / kParts;
  static constexpr int kWarpsOfPart = kWarpsOfHead / kParts;
  // A wait names a phase by its parity alone, so that a warp may pass by none of a barrier: every use of
  // a stage is for the same warps, and every warp that multiplies takes part in every record.
  static_assert(kStages % (kParts * kGroups) == 0, "a stage is always of the same part and group");
  static constexpr int kStageBytes = kDim * kDim * StateTile<kWide>::kStateBytes / kParts;

  uint4 stages[kStages][kStageBytes / 16];
  Record<kWide> records[kSystemWarps];
  uint64_t state_full[kStages], state_empty[kStages];
  uint64_t record_full[kSystemWarps], record_empty[kSystemWarps];
};

// Of the block's n-th head.
WARP_FN int head_number(int n) { return warp::block() + n * warp::blocks(); }

WARP_FN void arrive_once(uint64_t* at) {
  warp::sync();
  if (warp::lane() == 0) warp::arrive(at);
}

template <bool kWide, typename Shared>
WARP_FN void copy_state(Shared& shared, const char* state_at, int n) {
#pragma unroll
  for (int part = 0; part < Shared::kParts; ++part) {
    const Use<Shared::kStages> use(n * Shared::kParts + part);
    use.wait_empty(shared.state_empty);
    if (warp::lane() == 0)
      warp::copy_and_arrive(shared.stages[use.place], state_at + part * Shared::kStageBytes,
                            Shared::kStageBytes, shared.state_full + use.place);
  }
}

template <bool kWide, typename Shared>
WARP_FN void copy_states(const Arguments& x, Shared& shared) {
  Heads<true> heads(x);
  for (int n = 0; heads.seek(head_number(n)); ++n)
    copy_state<kWide>(shared, head_state<kWide>(x, heads.at(head_number(n))), n);
}

template <bool kWide>
WARP_FN void write_system(const Prepared<kWide>& p, Record<kWide>& record) {
  const int lane = warp::lane();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t *k = p.rows.k + 4 * i, *q = p.rows.q + 4 * i;
    record.rows[i][lane] = uint4{k[0], k[1], k[2], k[3]};
    record.rows[4 + i][lane] = uint4{q[0], q[1], q[2], q[3]};
  }
  const System& s = p.system;
  record.solved[0][lane] = uint4{warp::as_bits(s.inverse[0]), warp::as_bits(s.inverse[1]),
                                 warp::as_bits(s.carry[0]), warp::as_bits(s.carry[1])};
  record.solved[1][lane] =
      uint4{warp::as_bits(p.from_state[0][0]), warp::as_bits(p.from_state[0][1]),
            warp::as_bits(p.from_state[1][0]), warp::as_bits(p.from_state[1][1])};
  record.beta[lane] = uint2{warp::as_bits(s.beta[0]), warp::as_bits(s.beta[1])};
  record.after[lane] = p.pending.weight;
  if (lane == 0) record.decay.x = warp::as_bits(expf(p.pending.total));
}

// Keys and updates of eight pending rows, from `first` on.
template <bool kWide>
struct PendingInputs {
  uint32_t keys[16];
  EightRows<StateTile<kWide>::kUpdateBytes> updates;

  WARP_FN void load(const Arguments& x, const Work& w, int first) {
    load_pending_keys<kWide>(x, w, first, keys);
    updates.load(w.pending - first, [&](int row) {
      return static_cast<const char*>(update_of<kWide>(x, w, w.place(x, first + row), 0));
    });
  }
};

// Every kSystemWarps-th head, from `first` on, and a record that says that there are no more.
template <bool kWide, typename Shared>
WARP_FN void solve_systems(const Arguments& x, Shared& shared, int first) {
  Heads<> heads(x);
  int n = first;
  for (; heads.seek(head_number(n)); n += Shared::kSystemWarps) {
    const Use<Shared::kSystemWarps> use(n);
    const Work w = heads.at(head_number(n));
    const HeadInputs<kWide> inputs(x, w);
    PendingInputs<kWide> pending;
    pending.load(x, w, 0);
    EightRows<2> v;
    v.load(w.num_rows, [&](int row) {
      return reinterpret_cast<const char*>(x.v + (w.begin + row) * x.v_row + w.head * kDim);
    });
    const Prepared<kWide> prepared(x, w, inputs);
    use.wait_empty(shared.record_empty);
    Record<kWide>& record = shared.records[use.place];
    record.put(static_cast<int>(w.begin), static_cast<int>(w.slot), w.num_rows, w.start, w.pending,
               w.flush, w.head);
    v.store(record.v, 0);
    write_system(prepared, record);
    const PendingWeights weights_of(prepared.products, prepared.system);
    for (int block = 0; block < w.pending; block += 8) {
      float weights[4];
      weights_of.get(prepared.rows, pending.keys, prepared.pending, block, weights);
      record.weights[block / 8][warp::lane()] =
          uint4{warp::as_bits(weights[0]), warp::as_bits(weights[1]), warp::as_bits(weights[2]),
                warp::as_bits(weights[3])};
      pending.updates.store(record.updates, block);
      if (block + 8 < w.pending) pending.load(x, w, block + 8);
    }
    arrive_once(shared.record_full + use.place);
  }
  const Use<Shared::kSystemWarps> end(n);
  end.wait_empty(shared.record_empty);
  shared.records[end.place].put(0, 0, 0, 0, 0, 0, 0);
  arrive_once(shared.record_full + end.place);
}

// What a warp needs of a record for all of its tiles.
template <bool kWide>
struct HeadParts {
  Rows rows;
  System system;  // its beta
  float from_state[2][2];
  const Right<kWide> inverse, carry;

  WARP_FN static Right<kWide> right(uint32_t first, uint32_t second) {
    const float x[2] = {warp::as_float(first), warp::as_float(second)};
    return Right<kWide>(x);
  }

  WARP_FN HeadParts(const Record<kWide>& record, int lane)
      : HeadParts(record, lane, record.solved[0][lane]) {}

  WARP_FN HeadParts(const Record<kWide>& record, int lane, uint4 solved)
      : inverse(right(solved.x, solved.y)), carry(right(solved.z, solved.w)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 k = record.rows[i][lane], q = record.rows[4 + i][lane];
      rows.k[4 * i] = k.x, rows.k[4 * i + 1] = k.y, rows.k[4 * i + 2] = k.z;
      rows.k[4 * i + 3] = k.w;
      rows.q[4 * i] = q.x, rows.q[4 * i + 1] = q.y, rows.q[4 * i + 2] = q.z;
      rows.q[4 * i + 3] = q.w;
    }
    const uint4 from = record.solved[1][lane];
    from_state[0][0] = warp::as_float(from.x), from_state[0][1] = warp::as_float(from.y);
    from_state[1][0] = warp::as_float(from.z), from_state[1][1] = warp::as_float(from.w);
    const uint2 beta = record.beta[lane];
    system.beta[0] = warp::as_float(beta.x), system.beta[1] = warp::as_float(beta.y);
  }
};

// What belongs to 16 rows of dv of a head, beside their state; the lane's are dv and dv + 1.
template <bool kWide>
struct TileInputs {
  float pending[2][4] = {};
  Values v;  // tile 0 of it

  WARP_FN TileInputs(const Record<kWide>& record, int num_pending, int dv) {
    const int lane = warp::lane(), c = lane & 3;
    for (int block = 0; block < num_pending; block += 8) {
      Updates<kWide> updates;  // tile 0 of it
#pragma unroll
      for (int e = 0; e < 2; ++e)
        updates.load_pair(e, record.updates.at(block + 2 * c + e, dv), true);
      const uint4 bits = record.weights[block / 8][lane];
      const float weights[4] = {warp::as_float(bits.x), warp::as_float(bits.y),
                                warp::as_float(bits.z), warp::as_float(bits.w)};
      updates.apply(0, pending[0], weights);
      updates.apply(0, pending[1], weights + 2);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) v.x[e][0] = warp::load4(record.v.at(2 * c + e, dv));
  }
};

template <bool kWide>
WARP_FN void multiply_tile(const Arguments& x, const Work& w, int dv, const StateTile<kWide>& state,
                           const HeadParts<kWide>& head, const TileInputs<kWide>& inputs) {
  const int c = warp::lane() & 3;
  Results<kWide> results;  // tile 0 of it
  finish_tile(state, 0, head.rows, head.system, head.from_state, head.inverse, head.carry, inputs.v,
              inputs.pending, results);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * c + e;
    if (row >= w.num_rows) continue;
    warp::store4(x.out + (w.begin + row) * x.out_row + w.head * kDim + dv, results.out[e][0]);
    results.store_pair(e, update_of<kWide>(x, w, w.place(x, w.pending + row), dv));
  }
}

// Each kGroups-th head; of the others the warp only lets their record go. What does not need the state
// is done before the state is waited for.
template <bool kWide, typename Shared>
WARP_FN void multiply_heads(const Arguments& x, Shared& shared, int warp_number) {
  constexpr int kRowBytes = kDim * StateTile<kWide>::kStateBytes;
  constexpr int kQuartersAtOnce = kWide ? 1 : kQuarters;  // as many as registers allow
  const int first_tile = warp_number % Shared::kWarpsOfHead * Shared::kTilesOfWarp;
  const int part = first_tile / Shared::kTilesOfPart;
  const int in_tile = 2 * (warp::lane() >> 2);
  const int group = warp_number / Shared::kWarpsOfHead;
  for (int n = 0;; ++n) {
    const Use<Shared::kSystemWarps> use(n);
    const Use<Shared::kStages> stage(n * Shared::kParts + part);
    const Record<kWide>& record = shared.records[use.place];
    const char* const state_at = reinterpret_cast<const char*>(shared.stages[stage.place]) +
                                 (16 * (first_tile % Shared::kTilesOfPart) + in_tile) * kRowBytes;
    use.wait_full(shared.record_full);
    const Work w(x, record.request(), record.work[6], 0);
    if (w.num_rows == 0) break;
    if (n % Shared::kGroups != group) {
      arrive_once(shared.record_empty + use.place);
      continue;
    }
    const bool folds = w.flush != 0 && w.pending > 0;
#pragma unroll 1
    for (int i = 0; i < Shared::kTilesOfWarp; ++i) {
      const bool last = i + 1 == Shared::kTilesOfWarp;
      const HeadParts<kWide> head(record, warp::lane());  // again each time: registers are short
      const int dv = 16 * (first_tile + i) + in_tile;
      const TileInputs<kWide> inputs(record, w.pending, dv);
      if (last && !folds) arrive_once(shared.record_empty + use.place);
      if (i == 0) stage.wait_full(shared.state_full);
      StateTile<kWide> state;
      state.template load<false>(state_at + 16 * i * kRowBytes);
      if (last) arrive_once(shared.state_empty + stage.place);
      multiply_tile(x, w, dv, state, head, inputs);
      if (!folds) continue;
      const float decay = warp::as_float(record.decay.x);
      for (int quarter = 0; quarter < kQuarters; quarter += kQuartersAtOnce)
        fold_quarters<kWide, kQuartersAtOnce>(x, w, state, quarter, dv, decay,
                                              [&](int row) { return record.after[row & 31]; });
      if (last) arrive_once(shared.record_empty + use.place);
    }
  }
}

template <bool kWide, typename Shared>
WARP_FN void run_pipeline(const Arguments& x, Shared& shared) {
  if (warp::thread() == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      warp::make_barrier(shared.state_full + i, 1);
      warp::make_barrier(shared.state_empty + i, Shared::kWarpsOfPart);
    }
    for (int i = 0; i < Shared::kSystemWarps; ++i) {
      warp::make_barrier(shared.record_full + i, 1);
      warp::make_barrier(shared.record_empty + i, kTileWarps);
    }
    warp::barriers_made();
  }
  warp::block_sync();
  const int role = warp::thread() / 32;
  if (role < kTileWarps)
    multiply_heads<kWide>(x, shared, role);
  else if (role == kTileWarps + Shared::kSystemWarps)
    copy_states<kWide>(x, shared);
  else
    solve_systems<kWide>(x, shared, role - kTileWarps);
}

}  // namespace gdn
