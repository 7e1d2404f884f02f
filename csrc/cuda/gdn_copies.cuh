// The warps of the pipeline that copy: states into stages, v and pending updates into places of rows.
#pragma once

#include "gdn_records.cuh"

namespace gdn {

// A part of a state into a stage. Small copies are slow: a state of 32 KiB in sixteen of them takes its
// warp a thousand cycles, and memory a third longer than in four or one.
template <bool kWide, typename Shared>
WARP_FN void copy_part(const char* part_at, char* stage, uint64_t* full) {
  using Copied = StateRows<kWide>;
  constexpr int kGroupsOfCopy = Shared::kGroupsOfCopy;
  if (warp::lane() == 0) {
    warp::arrive_expecting(full, Shared::kGroupsOfPart * Copied::kGroupBytes);
#pragma unroll
    for (int group = 0; group < Shared::kGroupsOfPart; group += kGroupsOfCopy)
      warp::copy_for(stage + group * Copied::kGroupStride, part_at + group * Copied::kGroupBytes,
                     kGroupsOfCopy * Copied::kGroupBytes, full);
  }
  warp::sync();
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
  Heads<1> heads(x);
  warp::block_sync();  // barriers are made
  const typename Shared::BlockUnits units(x);
  Turn<Shared::kStages> state_turn(0);
  Turn<Shared::kRowPlaces> rows_turn(0);
  for (int m = 0;; ++m) {
    const Unit unit = units.at(m);
    if (!heads.seek(unit.head)) break;
    Work w = heads.at(unit.head);
#pragma unroll 1
    for (int h = 0; h < unit.count; ++h, ++w.head) {
      if (kStates) copy_state<kWide>(x, w, shared, state_turn);
      if (kRows) copy_head_rows<kWide>(x, w, shared, rows_turn);
    }
  }
  warp::end_group();
  warp::wait_groups<0>();  // no lane ends before its copies
}

}  // namespace gdn
