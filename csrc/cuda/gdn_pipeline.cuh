// A step by blocks that stay: in each, one warp copies states into a ring of stages, some warps solve
// small systems ahead, and eight warps multiply, a tile of every head each. No warp waits for what it
// could have asked for earlier, and a stage is held only from its copy to its products.
#pragma once

#include "gdn_fold.cuh"

namespace gdn {

constexpr int kTileWarps = kDim / 16;
constexpr int kMostBlocks = kRing / 8;  // of eight pending rows

// What the warps that multiply need of a head, each lane's part where the lane finds it in one load.
struct Record {
  uint4 rows[8][32];  // Rows: K, then Q
  uint4 solved[2][32];  // inverse, carry; from_state
  uint2 beta[32];
  uint4 weights[kMostBlocks][32];  // of eight pending rows on K, then on Q
  float after[kRing];  // Pending::weight
  float decay;  // of all pending rows
};

// A head's state takes kPartsOfHead stages. kLeftOut: what a launch for measurements does not do.
enum LeftOut { kNothing, kAllButCopies, kProducts, kCopies };

template <bool kWide, int kSystemWarpCount, int kStageCount, int kPartsOfHead, LeftOut kWithout>
struct PipelineShared {
  static constexpr int kSystemWarps = kSystemWarpCount, kStages = kStageCount;
  static constexpr int kParts = kPartsOfHead, kTilesOfPart = kTileWarps / kParts;
  static constexpr int kStageBytes = kDim * kDim * StateTile<kWide>::kStateBytes / kParts;
  static constexpr LeftOut kLeftOut = kWithout;

  uint4 stages[kStages][kStageBytes / 16];
  Record records[kSystemWarps];
  uint64_t state_full[kStages], state_empty[kStages];
  uint64_t record_full[kSystemWarps], record_empty[kSystemWarps];
};

// The heads with rows among those of a block: every `blocks`-th one. All warps of a block see the
// same ones in the same order.
struct Heads {
  const Arguments& x;
  unsigned left = 0;  // of 32 heads
  int base;

  WARP_FN explicit Heads(const Arguments& arguments)
      : x(arguments), base(warp::block() - 32 * warp::blocks()) {}

  WARP_FN int next() {
    const int total = x.requests * x.value_heads;
    while (left == 0) {
      base += 32 * warp::blocks();
      if (base >= total) return -1;
      const int head = base + warp::lane() * warp::blocks();
      bool live = false;
      if (head < total) {
        const int request = head / x.value_heads;
        live = x.slots[request] > 0 && x.query_start_loc[request + 1] > x.query_start_loc[request];
      }
      left = warp::ballot(live);
    }
    const int bit = warp::lowest_bit(left);
    left &= left - 1;
    return base + bit * warp::blocks();
  }
};

// Use k of a ring's place: its number, and which phases its barriers are in.
template <int kPlaces>
struct Use {
  int place, round;

  WARP_FN explicit Use(int k) : place(k % kPlaces), round(k / kPlaces) {}

  WARP_FN void wait_full(uint64_t* full) const { warp::wait(full + place, round & 1); }

  WARP_FN void wait_empty(uint64_t* empty) const {
    if (round > 0) warp::wait(empty + place, (round - 1) & 1);
  }
};

WARP_FN void arrive_once(uint64_t* at) {
  warp::sync();
  if (warp::lane() == 0) warp::arrive(at);
}

template <bool kWide, typename Shared>
WARP_FN void copy_states(const Arguments& x, Shared& shared) {
  Heads heads(x);
  int k = 0;
  for (int head = heads.next(); head >= 0; head = heads.next()) {
    const Work w(x, 2 * head);
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++k) {
      const Use<Shared::kStages> use(k);
      use.wait_empty(shared.state_empty);
      if (warp::lane() == 0)
        warp::copy_and_arrive(shared.stages[use.place],
                              head_state<kWide>(x, w) + part * Shared::kStageBytes,
                              Shared::kStageBytes, shared.state_full + use.place);
    }
  }
}

// v and the first updates of a head lie in L2 when the warps that multiply ask for them.
template <bool kWide>
WARP_FN void prefetch_inputs(const Arguments& x, const Work& w) {
  const int row = warp::lane() >> 2, quarter = warp::lane() & 3;
  if (row < w.num_rows)
    warp::prefetch_l2(x.v + (w.begin + row) * x.v_row + w.head * kDim + quarter * (kDim / 4));
  if (row < w.pending)
    warp::prefetch_l2(update_of<kWide>(x, w, w.place(x, row), quarter * (kDim / 4)));
}

template <bool kWide>
WARP_FN void write_record(const Prepared<kWide>& p, Record& record) {
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
  if (lane == 0) record.decay = expf(p.pending.total);
}

// Every kSystemWarps-th head, from `first` on.
template <bool kWide, typename Shared>
WARP_FN void solve_systems(const Arguments& x, Shared& shared, int first) {
  Heads heads(x);
  const int g = warp::lane() >> 2;
  int n = 0;
  for (int head = heads.next(); head >= 0; head = heads.next(), ++n) {
    const Use<Shared::kSystemWarps> use(n);
    if (use.place != first) continue;
    const Work w(x, 2 * head);
    prefetch_inputs<kWide>(x, w);
    uint32_t keys[16];
    load_pending_keys<kWide>(x, w, 0, keys);
    const Prepared<kWide> prepared(x, w);
    use.wait_empty(shared.record_empty);
    Record& record = shared.records[use.place];
    write_record(prepared, record);
    const PendingWeights weights_of(prepared.products, prepared.system);
    for (int block = 0; block < w.pending; block += 8) {
      float weights[4];
      weights_of.get(prepared.rows, keys, prepared.pending, block, weights);
      record.weights[block / 8][warp::lane()] =
          uint4{warp::as_bits(weights[0]), warp::as_bits(weights[1]), warp::as_bits(weights[2]),
                warp::as_bits(weights[3])};
      if (block + 8 < w.pending) load_pending_keys<kWide>(x, w, block + 8, keys);
    }
    arrive_once(shared.record_full + use.place);
  }
}

// A head as a warp that multiplies sees it before its turn: what comes from memory is under way.
// tile: 16 rows of dv; the lane's are dv and dv + 1.
template <bool kWide>
struct TileWork {
  Work w;
  Values v;                // tile 0 of it
  Updates<kWide> updates;  // tile 0 of it, of the first eight pending rows

  WARP_FN TileWork(const Arguments& x, int head, int dv) : w(x, 2 * head) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * c + e;
      v.x[e][0] = 0;
      if (row < w.num_rows)
        v.x[e][0] = warp::load4(x.v + (w.begin + row) * x.v_row + w.head * kDim + dv);
    }
    load_block(x, 0, dv);
  }

  WARP_FN void load_block(const Arguments& x, int first, int dv) {
    const int c = warp::lane() & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = first + 2 * c + e;
      updates.load_pair(e, update_of<kWide>(x, w, w.place(x, row), dv), row < w.pending);
    }
  }
};

template <bool kWide>
WARP_FN void multiply_tile(const Arguments& x, TileWork<kWide>& work, int dv,
                           const StateTile<kWide>& state, const Record& record) {
  const int lane = warp::lane(), c = lane & 3;
  const Work& w = work.w;
  float pending[2][4] = {};
  for (int block = 0; block < w.pending; block += 8) {
    const uint4 bits = record.weights[block / 8][lane];
    const float weights[4] = {warp::as_float(bits.x), warp::as_float(bits.y), warp::as_float(bits.z),
                              warp::as_float(bits.w)};
    work.updates.apply(0, pending[0], weights);
    work.updates.apply(0, pending[1], weights + 2);
    if (block + 8 < w.pending) work.load_block(x, block + 8, dv);
  }
  Rows rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 k = record.rows[i][lane], q = record.rows[4 + i][lane];
    rows.k[4 * i] = k.x, rows.k[4 * i + 1] = k.y, rows.k[4 * i + 2] = k.z, rows.k[4 * i + 3] = k.w;
    rows.q[4 * i] = q.x, rows.q[4 * i + 1] = q.y, rows.q[4 * i + 2] = q.z, rows.q[4 * i + 3] = q.w;
  }
  const uint4 solved = record.solved[0][lane], from = record.solved[1][lane];
  const uint2 beta = record.beta[lane];
  const float inverse[2] = {warp::as_float(solved.x), warp::as_float(solved.y)};
  const float carry[2] = {warp::as_float(solved.z), warp::as_float(solved.w)};
  const float from_state[2][2] = {{warp::as_float(from.x), warp::as_float(from.y)},
                                  {warp::as_float(from.z), warp::as_float(from.w)}};
  System system;
  system.beta[0] = warp::as_float(beta.x), system.beta[1] = warp::as_float(beta.y);
  Results<kWide> results;  // tile 0 of it
  finish_tile(state, 0, rows, system, from_state, Right<kWide>(inverse), Right<kWide>(carry), work.v,
              pending, results);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * c + e;
    if (row >= w.num_rows) continue;
    warp::store4(x.out + (w.begin + row) * x.out_row + w.head * kDim + dv, results.out[e][0]);
    results.store_pair(e, update_of<kWide>(x, w, w.place(x, w.pending + row), dv));
  }
}

template <bool kWide, typename Shared>
WARP_FN void multiply_heads(const Arguments& x, Shared& shared, int tile) {
  constexpr int kRowBytes = kDim * StateTile<kWide>::kStateBytes;
  const int in_tile = 2 * (warp::lane() >> 2), dv = 16 * tile + in_tile;
  const int part = tile / Shared::kTilesOfPart;
  const int rows_at = (16 * (tile % Shared::kTilesOfPart) + in_tile) * kRowBytes;
  Heads heads(x);
  int head = heads.next();
  if (head < 0) return;
  TileWork<kWide> next(x, head, dv);
  for (int n = 0; head >= 0; ++n) {
    TileWork<kWide> work = next;
    head = heads.next();
    if (head >= 0) next = TileWork<kWide>(x, head, dv);

    const Use<Shared::kSystemWarps> use(n);
    const Use<Shared::kStages> stage(n * Shared::kParts + part);
    if (Shared::kLeftOut != kCopies) stage.wait_full(shared.state_full);
    StateTile<kWide> state;
    state.template load<false>(reinterpret_cast<const char*>(shared.stages[stage.place]) + rows_at);
    arrive_once(shared.state_empty + stage.place);
    if (Shared::kLeftOut == kAllButCopies) continue;
    use.wait_full(shared.record_full);
    const Record& record = shared.records[use.place];
    if (Shared::kLeftOut != kProducts) multiply_tile(x, work, dv, state, record);
    if (work.w.flush != 0 && work.w.pending > 0)
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter)
        fold_quarters<kWide, 1>(x, work.w, state, quarter, dv, record.decay,
                                [&](int row) { return record.after[row & 31]; });
    arrive_once(shared.record_empty + use.place);
  }
}

template <bool kWide, typename Shared>
WARP_FN void run_pipeline(const Arguments& x, Shared& shared) {
  if (warp::thread() == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      warp::make_barrier(shared.state_full + i, 1);
      warp::make_barrier(shared.state_empty + i, Shared::kTilesOfPart);
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
  else if (Shared::kLeftOut != kAllButCopies)
    solve_systems<kWide>(x, shared, role - kTileWarps);
}

}  // namespace gdn
