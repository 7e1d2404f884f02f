// What the kernel is given, what of it a warp works on, and where that lies.
#pragma once

#include "gdn_tile.cuh"

namespace gdn {

struct Arguments {
  const uint16_t *q, *k, *v, *a, *b;  // bf16
  const float *A_log;
  const void* dt_bias;
  const int *query_start_loc, *slots, *start, *pending, *flush;
  char* state;
  uint16_t* keys;  // bf16
  char* updates;
  float *log_decay, *key_norm;
  uint16_t* out;  // bf16
  int64_t q_row, k_row, v_row, gate_row, out_row;
  int64_t state_slot, key_slot, update_slot, decay_slot, norm_slot;
  int32_t requests, value_heads, group, ring_rows, dt_bias_is_bf16;
  float scale;
};

// Of a request, as it lies in memory.
struct RequestInputs {
  int slot = 0, begin = 0, end = 0, start = 0, pending = 0, flush = 0;

  WARP_FN RequestInputs() {}

  // All in one trip to memory, which takes a microsecond under load.
  WARP_FN RequestInputs(const Arguments& x, int request)
      : slot(warp::load_now(x.slots + request)), begin(warp::load_now(x.query_start_loc + request)),
        end(warp::load_now(x.query_start_loc + request + 1)),
        start(warp::load_now(x.start + request)), pending(warp::load_now(x.pending + request)),
        flush(warp::load_now(x.flush + request)) {}
};

// A request's part of a step. Without rows or with the null slot, num_rows is 0.
struct Request {
  int begin = 0, slot = 0, num_rows = 0, start = 0, pending = 0, flush = 0;

  WARP_FN Request() {}

  WARP_FN explicit Request(const RequestInputs& in)
      : begin(in.begin), slot(in.slot), start(in.start), pending(in.pending), flush(in.flush) {
    // Always so, of the last three; but what a branch on num_rows does not need, the compiler asks
    // for behind it.
    constexpr int kNever = -2147483647;
    const bool live = slot > 0 && in.end > begin && (start | pending) >= 0 && flush != kNever;
    num_rows = live ? (in.end - begin < kRows ? in.end - begin : kRows) : 0;
  }

  WARP_FN Request(const Arguments& x, int request) : Request(RequestInputs(x, request)) {}
};

// What a warp works on.
struct Work {
  int64_t begin = 0, slot = 0;
  int num_rows = 0, start = 0, pending = 0, flush = 0, head = 0, key_head = 0, half = 0;

  WARP_FN Work() {}

  WARP_FN Work(const Arguments& x, int unit)
      : Work(x, Request(x, (unit >> 1) / x.value_heads), (unit >> 1) % x.value_heads, unit & 1) {}

  WARP_FN Work(const Arguments& x, const Request& request, int which_head, int which_half)
      : Work(request, which_head, which_head / x.group) {
    half = which_half;
  }

  WARP_FN Work(const Request& request, int which_head, int which_key_head)
      : begin(request.begin), slot(request.slot), num_rows(request.num_rows), start(request.start),
        pending(request.pending), flush(request.flush), head(which_head),
        key_head(which_key_head) {}

  // row < W, and for a row that is used start + row < 2 W.
  WARP_FN int place(const Arguments& x, int row) const {
    const int at = start + row;
    return at < x.ring_rows ? at : at - x.ring_rows;
  }
};

template <bool kWide>
WARP_FN char* head_state(const Arguments& x, const Work& w) {
  return x.state + (w.slot * x.state_slot + w.head * (kDim * kDim)) * StateTile<kWide>::kStateBytes;
}

// The lane's two rows of a tile, in a half head that begins at half_at.
template <bool kWide, typename At>
WARP_FN At tile_rows(At half_at, int tile) {
  return half_at + (8 * (warp::lane() >> 2) + 2 * tile) * (kDim * StateTile<kWide>::kStateBytes);
}

// The update of a row of the ring, from row dv of the head on.
template <bool kWide>
WARP_FN char* update_of(const Arguments& x, const Work& w, int place, int dv) {
  return x.updates +
         (w.slot * x.update_slot + (w.head * x.ring_rows + place) * kDim + dv) *
             StateTile<kWide>::kUpdateBytes;
}

template <bool kWide>
WARP_FN char* update_at(const Arguments& x, const Work& w, int place) {
  return update_of<kWide>(x, w, place, w.half * kHalf + 8 * (warp::lane() >> 2));
}

WARP_FN uint16_t* key_at(const Arguments& x, const Work& w, int place) {
  return x.keys + w.slot * x.key_slot + (w.key_head * x.ring_rows + place) * kDim;
}

}  // namespace gdn
