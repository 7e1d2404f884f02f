// Which heads a block of the pipeline works on: those that have rows, counted through the batch.
#pragma once

#include "gdn_verify.cuh"

namespace gdn {

// Heads that have rows, by their number among them; numbers are asked for in rising order. A lane
// holds one request in 32, and as it lies in memory one of each of the next kAhead times 32.
template <int kAhead>
struct Heads {
  const Arguments& x;
  int begin = 0, slot = 0, lengths = 0;  // of the lane's request; start, pending and so on together
  RequestInputs ahead[kAhead];
  unsigned live = 0;  // lanes whose request has rows
  int first = -32;    // request of lane 0
  int passed = 0;     // requests with rows before that

  WARP_FN explicit Heads(const Arguments& arguments) : x(arguments) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = ask(i);
    advance();
  }

  WARP_FN RequestInputs ask(int further) const {
    const int request = first + 32 * (1 + further) + warp::lane();
    return request < x.requests ? RequestInputs(x, request) : RequestInputs();
  }

  WARP_FN void advance() {
    passed += warp::count_bits(live);
    const Request mine(ahead[0]);
    first += 32;
    begin = mine.begin, slot = mine.slot;
    lengths = mine.num_rows | mine.start << 8 | mine.pending << 16 | (mine.flush != 0) << 24;
    live = warp::ballot(mine.num_rows > 0);
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
    ahead[kAhead - 1] = ask(kAhead - 1);
  }

  // Whether there are so many; then the lanes hold its request.
  WARP_FN bool seek(int number) {
    while (number / x.value_heads >= passed + warp::count_bits(live)) {
      if (first + 32 >= x.requests) return false;
      advance();
    }
    return true;
  }

  // After `seek`, which found it or one of its request.
  WARP_FN Work at(int number) const {
    const int which = number / x.value_heads - passed, lane = warp::lane();
    const int rank = warp::count_bits(live & ((1u << lane) - 1));
    const int from = warp::lowest_bit(warp::ballot((live >> lane & 1) && rank == which));
    const int of_it = warp::shuffle(lengths, from);
    Request request;
    request.begin = warp::shuffle(begin, from), request.slot = warp::shuffle(slot, from);
    request.num_rows = of_it & 255, request.start = of_it >> 8 & 255;
    request.pending = of_it >> 16 & 255, request.flush = of_it >> 24;
    return Work(x, request, number % x.value_heads, 0);
  }
};

// The first head of the block's m-th unit.
template <int kHeadsOfUnit>
WARP_FN int unit_head(int m) {
  return kHeadsOfUnit * (warp::block() + m * warp::blocks());
}

WARP_FN void arrive_once(uint64_t* at) {
  warp::sync();
  if (warp::lane() == 0) warp::arrive(at);
}

// A ring's places as a warp takes them, one after another or every kStep-th. A wait names a phase of
// a barrier by its parity alone, so a place that a warp takes is not filled for others in between.
template <int kPlaces, int kStep = 1>
struct Turn {
  int place, round = 0;  // the round's parity

  WARP_FN explicit Turn(int first) : place(first) {}

  WARP_FN void next() {
    place += kStep;
    if (place < kPlaces) return;
    place -= kPlaces, round ^= 1;
  }

  WARP_FN void wait_full(uint64_t* full) const { warp::wait(full + place, round); }

  // In the first round there is nothing to wait for, and a new barrier says so.
  WARP_FN void wait_empty(uint64_t* empty) const { warp::wait(empty + place, round ^ 1); }
};

}  // namespace gdn
