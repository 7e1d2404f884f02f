// The warps of the pipeline that multiply: they read shared memory alone, but for a fold.
#pragma once

#include "gdn_state_left.cuh"
#include "gdn_state_right.cuh"

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
    for (int n = 0;; n += kHeads, record_turn.next()) {
      record_turn.wait_full(shared.record_full);
      const auto& record = shared.records[record_turn.place];
      Work w = record.get();
      if (w.num_rows == 0) return;
      Rows rows;
      record.rows.get(rows);
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
  WARP_FN void multiply(const Work& w, const Record<kWide, kHeads>& record,
                        const SolvedHead<kWide>& solved, Rows& rows, bool folds,
                        bool last_of_unit) {
#pragma unroll 1
    for (int i = 0; i < Shared::kTilesOfWarp; ++i) {
      const bool last = i + 1 == Shared::kTilesOfWarp;
      const int tile = first_tile + i;
      const HeadParts<kWide> head(solved);
      const int dv = StateRows<kWide>::lane_row(tile);
      if (i == 0) rows_turn.wait_full(shared.rows_full);
      const TileInputs<kWide> inputs(solved, shared.rows[rows_turn.place], w, tile);
      if (last) arrive_once(shared.rows_empty + rows_turn.place);
      if (last && last_of_unit && !folds)
        arrive_once(shared.record_empty + record_turn.place);
      if (i == 0) stage_turn.wait_full(shared.state_full);
      StateTile<kWide> state;
      state.load_shared(state_at(dv));
      if (last) arrive_once(shared.state_empty + stage_turn.place);
      multiply_tile(x, w, tile, state, rows, head, inputs);
      if (!folds) continue;
      fold_tile(w, solved, state, dv);
      record.rows.get(rows);  // registers are too short to keep them through a fold
    }
  }

  WARP_FN void fold_tile(const Work& w, const SolvedHead<kWide>& solved,
                         const StateTile<kWide>& state, int dv) const {
    constexpr int kQuartersAtOnce = kWide ? 1 : kQuarters;  // as many as registers allow
    const float decay = warp::as_float(solved.decay.x);
    for (int quarter = 0; quarter < kQuarters; quarter += kQuartersAtOnce)
      fold_quarters<kWide, kQuartersAtOnce>(x, w, state, quarter, dv, decay,
                                            [&](int row) { return solved.after[row & 31]; });
  }
};

}  // namespace gdn
