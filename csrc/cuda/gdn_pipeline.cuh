// A step by blocks that stay: in each, one or two warps copy states into a ring of stages, and v and
// pending updates into another, some solve small systems ahead, and eight multiply. Those never read
// device memory: a trip there takes a microsecond, and a head may not take more than one and a third.
//
// No order of turns makes it hang. Heads are taken in one order by all warps, and a place of a ring is
// filled once what filled it before has been let go, which was of an earlier head. So whatever the
// earliest head that is not done waits for can be filled: those before it are done.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

// The first head of the block's m-th unit.
template <int kHeadsOfUnit>
WARP_FN int unit_head(int m) {
  return kHeadsOfUnit * (warp::block() + m * warp::blocks());
}

WARP_FN void arrive_once(uint64_t* at) {
  warp::sync();
  if (warp::lane() == 0) warp::arrive(at);
}

// A part of a state into a stage, eight rows a lane.
template <bool kWide, typename Shared>
WARP_FN void copy_part(const char* part_at, char* stage, uint64_t* full) {
  constexpr int kGroupBytes = StateRows<kWide>::kGroupBytes, kGroupCount = 2 * Shared::kTilesOfPart;
  const int lane = warp::lane();
  if (lane == 0) warp::arrive_expecting(full, kGroupCount * kGroupBytes);
  warp::sync();
  if (lane < kGroupCount)
    warp::copy_for(stage + lane * StateRows<kWide>::kGroupStride, part_at + lane * kGroupBytes,
                   kGroupBytes, full);
}

template <bool kWide, typename Shared>
WARP_FN void copy_state(const Arguments& x, const Work& w, Shared& shared,
                        Turn<Shared::kStages>& turn) {
  constexpr int kPartBytes = kDim * kDim * StateTile<kWide>::kStateBytes / Shared::kParts;
  const char* const state_at = head_state<kWide>(x, w);
#pragma unroll
  for (int part = 0; part < Shared::kParts; ++part, turn.next()) {
    turn.wait_empty(shared.state_empty);
    copy_part<kWide, Shared>(state_at + part * kPartBytes,
                             reinterpret_cast<char*>(shared.stages[turn.place]),
                             shared.state_full + turn.place);
  }
}

// Eight rows of dv numbers from device memory into a table, 16 bytes a lane and copy.
// row_at(row): a row's address; rows from `count` on are left as they are.
template <int kNumberBytes, typename Table, typename RowAt>
WARP_FN void copy_rows(Table& table, int first, int count, RowAt row_at) {
  constexpr int kLanesOfRow = kDim * kNumberBytes / 16;
  const int dv = warp::lane() % kLanesOfRow * (16 / kNumberBytes);
#pragma unroll
  for (int i = 0; i < 8 * kLanesOfRow / 32; ++i) {
    const int row = first + (32 * i + warp::lane()) / kLanesOfRow;
    if (row < count) warp::copy16(table.at(row, dv), row_at(row) + dv * kNumberBytes);
  }
}

template <bool kWide, typename Shared>
WARP_FN void copy_head_rows(const Arguments& x, const Work& w, Shared& shared,
                            Turn<Shared::kRowPlaces>& turn) {
  HeadRows<kWide>& rows = shared.rows[turn.place];
  turn.wait_empty(shared.rows_empty);
  copy_rows<2>(rows.v, 0, w.num_rows, [&](int row) {
    return reinterpret_cast<const char*>(x.v + (w.begin + row) * x.v_row + w.head * kDim);
  });
#pragma unroll 1
  for (int first = 0; first < w.pending; first += 8)
    copy_rows<StateTile<kWide>::kUpdateBytes>(rows.updates, first, w.pending, [&](int row) {
      return static_cast<const char*>(update_of<kWide>(x, w, w.place(x, row), 0));
    });
  warp::arrive_after_copies(shared.rows_full + turn.place);
  turn.next();
}

// By one warp, or by one for states and one for rows.
template <bool kWide, bool kStates, bool kRows, typename Shared>
WARP_FN void copy_heads(const Arguments& x, Shared& shared) {
  constexpr int kUnit = Shared::kHeadsOfUnit;
  Heads<1> heads(x);
  Turn<Shared::kStages> state_turn(0);
  Turn<Shared::kRowPlaces> rows_turn(0);
  for (int m = 0; heads.seek(unit_head<kUnit>(m)); ++m) {
    Work w = heads.at(unit_head<kUnit>(m));
#pragma unroll 1
    for (int h = 0; h < kUnit; ++h, ++w.head) {
      if (kStates) copy_state<kWide>(x, w, shared, state_turn);
      if (kRows) copy_head_rows<kWide>(x, w, shared, rows_turn);
    }
  }
  warp::end_group();
  warp::wait_groups<0>();  // no lane ends before its copies
}

// Systems of the value heads of a unit, solved in step.
template <bool kWide, int kHeads>
struct SolvedUnit {
  Rows rows;
  Products products;
  Pending pending[kHeads];
  System systems[kHeads];
  float with_keys[4] = {};  // K and Q times the keys of the first eight pending rows

  WARP_FN SolvedUnit(const Arguments& x, const Work (&w)[kHeads]) {
    const KeyInputs<kWide> key(x, w[0]);
    uint32_t keys[16];
    load_pending_keys<kWide>(x, w[0], 0, keys);
    Gates gates[kHeads];
    float log_decay[kHeads];
    load_gates(x, w, gates, log_decay);
    rows = key.rows;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) pending[h] = pending_of(log_decay[h], key.key_norm);
    products = products_of(rows, x.scale);
    multiply_rows(rows, keys, with_keys);
    solve(products, gates, w[0].num_rows, systems);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) append<kWide>(x, w[h], rows, products, gates[h]);
  }

  WARP_FN static void load_gates(const Arguments& x, const Work (&w)[kHeads],
                                 Gates (&gates)[kHeads], float (&log_decay)[kHeads]) {
    const GateInputs first(x, w[0]), last(x, w[kHeads - 1]);
    gates[0] = first.gates(), log_decay[0] = first.log_decay;
    if (kHeads > 1) gates[kHeads - 1] = last.gates(), log_decay[kHeads - 1] = last.log_decay;
  }

  WARP_FN void write(Record<kHeads>& record) const {
    const int lane = warp::lane(), c = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t *k = rows.k + 4 * i, *q = rows.q + 4 * i;
      record.rows[i][lane] = uint4{k[0], k[1], k[2], k[3]};
      record.rows[4 + i][lane] = uint4{q[0], q[1], q[2], q[3]};
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const System& s = systems[h];
      SolvedHead& to = record.heads[h];
      const uint2 inverse = Right<kWide>(s.inverse).packed();
      const uint2 carry = Right<kWide>(s.carry).packed();
      to.solved[lane] = uint4{inverse.x, inverse.y, carry.x, carry.y};
      to.after[lane] = pending[h].weight;
      const float decay = expf(pending[h].total);
      if (lane == 0) to.decay.x = warp::as_bits(decay);
      if (lane != c) continue;
      to.from_state[c] =
          uint4{warp::as_bits(s.from_start_k[0] * decay), warp::as_bits(s.from_start_k[1] * decay),
                warp::as_bits(s.from_start_q[0] * decay), warp::as_bits(s.from_start_q[1] * decay)};
      to.beta[c] = uint2{warp::as_bits(s.beta[0]), warp::as_bits(s.beta[1])};
    }
  }

  // Of eight pending rows, whose products with K and Q these are.
  WARP_FN void write_weights(Record<kHeads>& record, int block,
                             const float (&with_keys)[4]) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float weights[4];
      PendingWeights(products, systems[h]).get(with_keys, pending[h], 8 * block, weights);
      const float for_k[2] = {weights[0], weights[1]}, for_q[2] = {weights[2], weights[3]};
      const uint2 k = UpdateWeights<kWide>(for_k).packed();
      const uint2 q = UpdateWeights<kWide>(for_q).packed();
      record.heads[h].weights[block][warp::lane()] = uint4{k.x, k.y, q.x, q.y};
    }
  }
};

// Every kSystemWarps-th unit, from `first` on, and a record that says that there are no more.
template <bool kWide, typename Shared>
WARP_FN void solve_systems(const Arguments& x, Shared& shared, int first) {
  constexpr int kHeads = Shared::kHeadsOfUnit;
  Heads<2> heads(x);  // as many as a unit's way to the next one passes
  Turn<Shared::kSystemWarps, Shared::kSystemWarps> turn(first);
  Record<kHeads>& record = shared.records[first];
  for (int m = first; heads.seek(unit_head<kHeads>(m)); m += Shared::kSystemWarps, turn.next()) {
    const Work one = heads.at(unit_head<kHeads>(m));
    Work w[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) w[h] = one, w[h].head += h;
    const SolvedUnit<kWide, kHeads> unit(x, w);
    turn.wait_empty(shared.record_empty);
    record.put(one);
    unit.write(record);
    if (one.pending > 0) unit.write_weights(record, 0, unit.with_keys);
    for (int block = 1; 8 * block < one.pending; ++block) {
      uint32_t keys[16];
      load_pending_keys<kWide>(x, one, 8 * block, keys);
      float with_these[4] = {};
      multiply_rows(unit.rows, keys, with_these);
      unit.write_weights(record, block, with_these);
    }
    arrive_once(shared.record_full + turn.place);
  }
  turn.wait_empty(shared.record_empty);
  record.put(Work());
  arrive_once(shared.record_full + turn.place);
}

// K and Q of a record.
template <int kHeads>
WARP_FN void load_rows(const Record<kHeads>& record, Rows& rows) {
  const int lane = warp::lane();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 k = record.rows[i][lane], q = record.rows[4 + i][lane];
    rows.k[4 * i] = k.x, rows.k[4 * i + 1] = k.y, rows.k[4 * i + 2] = k.z, rows.k[4 * i + 3] = k.w;
    rows.q[4 * i] = q.x, rows.q[4 * i + 1] = q.y, rows.q[4 * i + 2] = q.z, rows.q[4 * i + 3] = q.w;
  }
}

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
    const uint4 from = head.from_state[c];
    from_state[0][0] = warp::as_float(from.x), from_state[0][1] = warp::as_float(from.y);
    from_state[1][0] = warp::as_float(from.z), from_state[1][1] = warp::as_float(from.w);
    const uint2 beta = head.beta[c];
    system.beta[0] = warp::as_float(beta.x), system.beta[1] = warp::as_float(beta.y);
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

// A warp that multiplies: its tiles of each kGroups-th head; the rows of the others it only lets go.
template <bool kWide, typename Shared>
struct TileWarp {
  static constexpr int kHeads = Shared::kHeadsOfUnit;
  const Arguments& x;
  Shared& shared;
  const int group, first_tile, part;
  Turn<Shared::kSystemWarps> record_turn;
  Turn<Shared::kRowPlaces> rows_turn;
  Turn<Shared::kStages, Shared::kParts> stage_turn;

  WARP_FN TileWarp(const Arguments& arguments, Shared& its_shared, int warp_number)
      : x(arguments), shared(its_shared), group(warp_number / Shared::kWarpsOfHead),
        first_tile(warp_number % Shared::kWarpsOfHead * Shared::kTilesOfWarp),
        part(first_tile / Shared::kTilesOfPart), record_turn(0), rows_turn(0), stage_turn(part) {}

  WARP_FN void run() {
    for (int n = 0;; n += kHeads, record_turn.next()) {
      record_turn.wait_full(shared.record_full);
      const Record<kHeads>& record = shared.records[record_turn.place];
      Work w = record.get();
      if (w.num_rows == 0) return;
      Rows rows;
      load_rows(record, rows);
      const bool folds = w.flush != 0 && w.pending > 0;
#pragma unroll 1
      for (int h = 0; h < kHeads; ++h, ++w.head) {
        if (takes(n + h)) {
          multiply(w, record, record.heads[h], rows, folds, h + Shared::kGroups >= kHeads);
        } else {
          rows_turn.wait_full(shared.rows_full);
          arrive_once(shared.rows_empty + rows_turn.place);
        }
        rows_turn.next(), stage_turn.next();
      }
      const bool none = kHeads < Shared::kGroups && !takes(n);
      if (folds || none) arrive_once(shared.record_empty + record_turn.place);
    }
  }

  WARP_FN bool takes(int n) const {
    return Shared::kGroups == 1 || n % Shared::kGroups == group;
  }

  // Where the lane's first row of a tile lies.
  WARP_FN const char* state_at(int dv) const {
    return reinterpret_cast<const char*>(shared.stages[stage_turn.place]) +
           StateRows<kWide>::offset(dv - 16 * Shared::kTilesOfPart * part);
  }

  // What does not need the state is done before the state is waited for. Without a fold the record is
  // let go once the last of the unit's heads has read it.
  WARP_FN void multiply(const Work& w, const Record<kHeads>& record, const SolvedHead& solved,
                        Rows& rows, bool folds, bool last_of_unit) {
#pragma unroll 1
    for (int i = 0; i < Shared::kTilesOfWarp; ++i) {
      const bool last = i + 1 == Shared::kTilesOfWarp;
      const HeadParts<kWide> head(solved);
      const int dv = StateRows<kWide>::lane_row(first_tile + i);
      if (i == 0) rows_turn.wait_full(shared.rows_full);
      const TileInputs<kWide> inputs(solved, shared.rows[rows_turn.place], w, dv);
      if (last) arrive_once(shared.rows_empty + rows_turn.place);
      if (last && last_of_unit && !folds)
        arrive_once(shared.record_empty + record_turn.place);
      if (i == 0) stage_turn.wait_full(shared.state_full);
      StateTile<kWide> state;
      state.template load<false>(state_at(dv));
      if (last) arrive_once(shared.state_empty + stage_turn.place);
      multiply_tile(x, w, dv, state, rows, head, inputs);
      if (!folds) continue;
      fold_tile(w, solved, state, dv);
      load_rows(record, rows);  // registers are too short to keep them through a fold
    }
  }

  WARP_FN void fold_tile(const Work& w, const SolvedHead& solved, const StateTile<kWide>& state,
                         int dv) const {
    constexpr int kQuartersAtOnce = kWide ? 1 : kQuarters;  // as many as registers allow
    const float decay = warp::as_float(solved.decay.x);
    for (int quarter = 0; quarter < kQuarters; quarter += kQuartersAtOnce)
      fold_quarters<kWide, kQuartersAtOnce>(x, w, state, quarter, dv, decay,
                                            [&](int row) { return solved.after[row & 31]; });
  }
};

template <bool kWide, typename Shared>
WARP_FN void run_pipeline(const Arguments& x, Shared& shared) {
  if (warp::thread() == 0) shared.make_barriers();
  warp::block_sync();
  const int role = warp::thread() / 32, system = role - kTileWarps;
  if (system < 0)
    TileWarp<kWide, Shared>(x, shared, role).run();
  else if (system < Shared::kSystemWarps)
    solve_systems<kWide>(x, shared, system);
  else if (Shared::kCopyWarps == 1)
    copy_heads<kWide, true, true>(x, shared);
  else if (system == Shared::kSystemWarps)
    copy_heads<kWide, true, false>(x, shared);
  else
    copy_heads<kWide, false, true>(x, shared);
}

}  // namespace gdn
