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
  Gates gates[kHeads];
  float with_keys[4] = {};  // K and Q times the keys of the first eight pending rows

  WARP_FN SolvedUnit(const Arguments& x, const Work (&w)[kHeads]) {
    float log_decay[kHeads];
    load_decays(x, w, log_decay);
    const KeyInputs<kWide> key(x, w[0]);
    uint32_t keys[16];
    load_pending_keys<kWide>(x, w[0], 0, keys);
    load_gates(x, w[0], gates);
    rows = key.rows;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) pending[h] = pending_of(log_decay[h], key.key_norm);
    products = products_of(rows, x.scale);
    multiply_rows(rows, keys, with_keys);
    solve(products, gates, w[0].num_rows, systems);
  }

  // Behind the record: nobody in the block waits for it.
  WARP_FN void append_rows(const Arguments& x, const Work (&w)[kHeads]) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) append<kWide>(x, w[h], rows, products, gates[h]);
  }

  // Of pending row `lane`. Asked for at once, because the compiler would put it behind what gates are made
  // of has arrived and been used: two trips to memory.
  WARP_FN static void load_decays(const Arguments& x, const Work (&w)[kHeads],
                                  float (&log_decay)[kHeads]) {
    const int lane = warp::lane();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) log_decay[h] = 0.0f;
    if (lane >= w[0].pending) return;
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      log_decay[h] = warp::load_now(x.log_decay + w[h].slot * x.decay_slot +
                                    w[h].head * x.ring_rows + w[h].place(x, lane));
  }

  // Lanes 8 h to 8 h + 7 have head h's, once for all of them.
  WARP_FN static void load_gates(const Arguments& x, const Work& first, Gates (&gates)[kHeads]) {
    static_assert(kHeads == 1 || kHeads == 2, "a bit of the lane's number");
    const int lane = warp::lane();
    Work mine = first;
    mine.head += lane >> 3 & (kHeads - 1);
    const Gates all = GateInputs(x, mine).gates();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int from = 8 * h + (lane & 7);
      gates[h] = {warp::shuffle(all.log_decay, from), warp::shuffle(all.beta, from)};
    }
  }

  template <typename Record>
  WARP_FN void write(Record& record) const {
    const int lane = warp::lane(), c = lane & 3;
    record.put_rows(rows);
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
#pragma unroll
      for (int e = 0; e < 2; ++e)
        to.token[2 * c + e] =
            uint4{warp::as_bits(s.from_start_k[e] * decay), warp::as_bits(s.from_start_q[e] * decay),
                  warp::as_bits(s.beta[e]), 0};
    }
  }

  // Of eight pending rows, whose products with K and Q these are.
  template <typename Record>
  WARP_FN void write_weights(Record& record, int block,
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

// The systems of kHeads value heads from w's on into a record, which is waited for.
template <bool kWide, int kHeads, typename Shared>
WARP_FN void solve_unit(const Arguments& x, const Work& one, Shared& shared,
                        const Turn<Shared::kSystemWarps, Shared::kSystemWarps>& turn) {
  auto& record = shared.records[turn.place];
  Work w[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) w[h] = one, w[h].head += h;
  const SolvedUnit<kWide, kHeads> unit(x, w);
  turn.wait_empty(shared.record_empty);
  record.put(one, kHeads);
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
  unit.append_rows(x, w);
}

// Every kSystemWarps-th unit, from `first` on, and a record that says that there are no more.
template <bool kWide, typename Shared>
WARP_FN void solve_systems(const Arguments& x, Shared& shared, int first) {
  constexpr int kHeads = Shared::kHeadsOfUnit;
  Heads<2> heads(x);  // as many as a unit's way to the next one passes
  warp::block_sync();  // barriers are made
  const typename Shared::BlockUnits units(x);
  Turn<Shared::kSystemWarps, Shared::kSystemWarps> turn(first);
  for (int m = first;; m += Shared::kSystemWarps, turn.next()) {
    const Unit unit = units.at(m);
    if (!heads.seek(unit.head)) break;
    const Work one = heads.at(unit.head);
    if (unit.count == kHeads)
      solve_unit<kWide, kHeads>(x, one, shared, turn);
    else
      solve_unit<kWide, 1>(x, one, shared, turn);
  }
  turn.wait_empty(shared.record_empty);
  shared.records[first].put(Work(), 0);
  arrive_once(shared.record_full + turn.place);
}

}  // namespace gdn
