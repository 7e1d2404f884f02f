// The warp of the pipeline that copies: states into stages, v and pending updates into places of rows.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

// A part of a state into a stage, a group of its rows a lane.
template <bool kWide, typename Shared>
WARP_FN void copy_part(const char* part_at, char* stage, uint64_t* full) {
  constexpr int kGroupBytes = StateRows<kWide>::kGroupBytes, kGroupCount = Shared::kGroupsOfPart;
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

template <bool kWide, typename Shared>
WARP_FN void copy_heads(const Arguments& x, Shared& shared) {
  constexpr int kUnit = Shared::kHeadsOfUnit;
  Heads<1> heads(x);
  if (Shared::kSystemsFirst) {
    warp::block_sync();
    warp::wait(&shared.inputs_here, 0);
  }
  Turn<Shared::kStages> state_turn(0);
  Turn<Shared::kRowPlaces> rows_turn(0);
  for (int m = 0; heads.seek(unit_head<kUnit>(m)); ++m) {
    Work w = heads.at(unit_head<kUnit>(m));
#pragma unroll 1
    for (int h = 0; h < kUnit; ++h, ++w.head) {
      copy_state<kWide>(x, w, shared, state_turn);
      copy_head_rows<kWide>(x, w, shared, rows_turn);
    }
  }
  warp::end_group();
  warp::wait_groups<0>();  // no lane ends before its copies
}

}  // namespace gdn
