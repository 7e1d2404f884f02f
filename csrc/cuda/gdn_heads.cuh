// Which heads a block of the pipeline works on: those that have rows, counted through the batch.
#pragma once

#include "gdn_verify.cuh"

namespace gdn {

// Heads that have rows, by their number among them; numbers are asked for in rising order. A lane holds
// one request in 32; with kAhead it asks for its next one before that is needed.
template <bool kAhead = false>
struct Heads {
  const Arguments& x;
  int begin = 0, slot = 0, lengths = 0;  // of the lane's request; start, pending and so on together
  Request ahead;
  unsigned live = 0;  // lanes whose request has rows
  int first = -32;    // request of lane 0
  int passed = 0;     // requests with rows before that

  WARP_FN explicit Heads(const Arguments& arguments) : x(arguments) {
    if (kAhead) ahead = ask();
    advance();
  }

  WARP_FN Request ask() const {
    const int request = first + 32 + warp::lane();
    return request < x.requests ? Request(x, request) : Request();
  }

  WARP_FN void advance() {
    passed += warp::count_bits(live);
    const Request mine = kAhead ? ahead : ask();
    first += 32;
    begin = mine.begin, slot = mine.slot;
    lengths = mine.num_rows | mine.start << 8 | mine.pending << 16 | (mine.flush != 0) << 24;
    live = warp::ballot(mine.num_rows > 0);
    if (kAhead) ahead = ask();
  }

  // Whether there are so many; then the lanes hold its request.
  WARP_FN bool seek(int number) {
    while (number / x.value_heads >= passed + warp::count_bits(live)) {
      if (first + 32 >= x.requests) return false;
      advance();
    }
    return true;
  }

  // After `seek`, which found it.
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

}  // namespace gdn
