// The warps of the pipeline that solve systems ahead.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

// Systems of the value heads of a unit, solved in step.
template <bool kWide, int kHeads>
struct SolvedUnit {
  Rows rows;
  Products products;
  Pending pending[kHeads];
  System systems[kHeads];
  float with_keys[4] = {};  // K and Q times the keys of the first eight pending rows

  // inputs_here(bits): called once what the systems are made of has been loaded, which the bits need.
  template <typename InputsHere>
  WARP_FN SolvedUnit(const Arguments& x, const Work (&w)[kHeads], InputsHere inputs_here) {
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
    inputs_here(warp::as_bits(with_keys[0]) ^ warp::as_bits(gates[0].beta) ^
                warp::as_bits(gates[kHeads - 1].beta));
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

  WARP_FN void write(Record<kWide, kHeads>& record) const {
    const int lane = warp::lane();
    record.rows.put(rows);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const System& s = systems[h];
      SolvedHead<kWide>& to = record.heads[h];
      const uint2 inverse = Right<kWide>(s.inverse).packed();
      const uint2 carry = Right<kWide>(s.carry).packed();
      to.solved[lane] = uint4{inverse.x, inverse.y, carry.x, carry.y};
      to.after[lane] = pending[h].weight;
      const float decay = expf(pending[h].total);
      if (lane == 0) to.decay.x = warp::as_bits(decay);
      to.factors.put(s, decay);
    }
  }

  // Of eight pending rows, whose products with K and Q these are.
  WARP_FN void write_weights(Record<kWide, kHeads>& record, int block,
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

// Nothing that an arrival does needs a load that was asked for before it, so it would not wait for one:
// its address is made to need what was loaded, by a mask of which no compiler knows that it is 0.
WARP_FN void arrive_having(uint32_t loaded, uint64_t* at, const Arguments& x) {
  const uint32_t zero = static_cast<uint32_t>(x.requests) >> 31;  // their number is not negative
  arrive_once(at + (loaded & zero));
}

// Every kSystemWarps-th unit, from `first` on, and a record that says that there are no more.
template <bool kWide, typename Shared>
WARP_FN void solve_systems(const Arguments& x, Shared& shared, int first) {
  constexpr int kHeads = Shared::kHeadsOfUnit;
  Heads<2> heads(x);  // as many as a unit's way to the next one passes
  if (Shared::kSystemsFirst) warp::block_sync();
  Turn<Shared::kSystemWarps, Shared::kSystemWarps> turn(first);
  Record<kWide, kHeads>& record = shared.records[first];
  int m = first;
  for (; heads.seek(unit_head<kHeads>(m)); m += Shared::kSystemWarps, turn.next()) {
    const Work one = heads.at(unit_head<kHeads>(m));
    Work w[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) w[h] = one, w[h].head += h;
    const bool first_of_block = Shared::kSystemsFirst && m == 0;
    const SolvedUnit<kWide, kHeads> unit(x, w, [&](uint32_t bits) {
      if (first_of_block) arrive_having(bits, &shared.inputs_here, x);
    });
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
  const bool no_units = m == 0;
  if (Shared::kSystemsFirst && no_units) arrive_once(&shared.inputs_here);
  turn.wait_empty(shared.record_empty);
  record.put(Work());
  arrive_once(shared.record_full + turn.place);
}

}  // namespace gdn
