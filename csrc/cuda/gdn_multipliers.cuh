// The warps of the pipeline that multiply: they read shared memory alone.
#pragma once

#include "gdn_products.cuh"

namespace gdn {

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
    for (int n = 0;; record_turn.next()) {
      record_turn.wait_full(shared.record_full);
      const Record<kHeads>& record = shared.records[record_turn.place];
      Work w = record.get();
      if (w.num_rows == 0) return;
      Rows rows = record.get_rows();
      const bool folds = w.flush != 0 && w.pending > 0;
      const int count = record.count();
      const bool none = count < Shared::kGroups && !takes(n);
#pragma unroll 1
      for (int h = 0; h < count; ++h, ++n, ++w.head) {
        if (takes(n)) {
          multiply(w, record, record.heads[h], rows, folds, h + Shared::kGroups >= count);
        } else {
          rows_turn.wait_full(shared.rows_full);
          arrive_once(shared.rows_empty + rows_turn.place);
        }
        rows_turn.next(), stage_turn.next();
      }
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
      const auto read_inputs = [&] {
        if (last) arrive_once(shared.rows_empty + rows_turn.place);
        if (last && last_of_unit && !folds)
          arrive_once(shared.record_empty + record_turn.place);
        if (i == 0) stage_turn.wait_full(shared.state_full);
      };
      const auto read_state = [&] {
        if (last) arrive_once(shared.state_empty + stage_turn.place);
      };
      StateTile<kWide> state;
      multiply_tile(w, solved, rows, first_tile + i, i == 0, state, read_inputs, read_state);
      if (!folds) continue;
      fold_tile(w, solved, state, StateRows<kWide>::lane_row(first_tile + i));
      rows = record.get_rows();  // registers are too short to keep them through a fold
    }
  }

  template <typename ReadInputs, typename ReadState>
  WARP_FN void multiply_tile(const Work& w, const SolvedHead& solved, const Rows& rows, int tile,
                             bool first, StateTile<false>& state, ReadInputs read_inputs,
                             ReadState read_state) {
    ExchangedTile t(tile);
    const uint4 token = solved.token[t.g], own = solved.solved[t.lane];
    float pending[2][4] = {};
    if (first) rows_turn.wait_full(shared.rows_full);
    t.load(w, solved, shared.rows[rows_turn.place], pending);
    const char* const at = state_at(t.state_row());  // known before the wait in read_inputs
    read_inputs();
    state.template load<false>(at);
    read_state();
    t.multiply(state, rows, token, own, pending);
    t.store(x, w);
  }

  template <typename ReadInputs, typename ReadState>
  WARP_FN void multiply_tile(const Work& w, const SolvedHead& solved, const Rows& rows, int tile,
                             bool first, StateTile<true>& state, ReadInputs read_inputs,
                             ReadState read_state) {
    const HeadParts<true> head(solved);
    const int dv = StateRows<true>::lane_row(tile);
    if (first) rows_turn.wait_full(shared.rows_full);
    const TileInputs<true> inputs(solved, shared.rows[rows_turn.place], w, dv);
    read_inputs();
    state.template load<false>(state_at(dv));
    read_state();
    gdn::multiply_tile(x, w, dv, state, rows, head, inputs);
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

}  // namespace gdn
