// A block's threads on a CPU: fibers that take turns, warp by warp, and what they wait for.
//
// Which warp has the next turn is a schedule: in order, or by a seed some warps run ahead, some lag
// behind, and copies arrive late. So a warp that relies on another one's speed is seen, and a block in
// which every warp waits for another one ends with `false` instead of hanging.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace warp {

struct Message {
  float f[10];
  uint32_t u[8];
};

constexpr int kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;

// A barrier's 64 bits: arrivals of a phase, those and the bytes that are still to come, and the phase.
struct BarrierBits {
  uint8_t arrivals, left;
  uint16_t phase;
  int32_t bytes;
};

inline BarrierBits bits_of(const uint64_t* at) {
  BarrierBits bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

inline bool completed(const uint64_t* at, int parity) {
  return (bits_of(at).phase & 1) != static_cast<unsigned>(parity);
}

struct Awaited {
  const uint64_t* at;
  int parity;
};

struct Fibers {
  ucontext_t caller, threads[kMaxThreads];
  std::vector<char> stacks;
  std::function<void()> body;
  Message messages[2][kMaxThreads];
  unsigned turns[kMaxThreads];
  int count = 0, current = 0, left = 0, block = 0, blocks = 1;
  int arrived[kMaxWarps];
  unsigned meetings[kMaxWarps];
  int live[kMaxWarps];     // threads of a warp that have not ended
  int blocked[kMaxWarps];  // of those, threads that wait for the warp's barrier
  Awaited awaited[kMaxWarps];
  int waiting = 0, sum[2] = {};
  unsigned barriers = 0;
  unsigned seed = 0;  // 0: turns in order, copies arrive at once
  std::mt19937 random;
  double readiness[kMaxWarps];
  std::vector<std::function<void()>> under_way;
  bool stuck = false;
};

inline Fibers& fibers() {
  static Fibers all;
  return all;
}

inline int thread() { return fibers().current; }
inline int lane() { return fibers().current & 31; }
inline int block_size() { return fibers().count; }
inline int block() { return fibers().block; }
inline int blocks() { return fibers().blocks; }

inline bool chance(double of_it) {
  return std::uniform_real_distribution<double>(0, 1)(fibers().random) < of_it;
}

// A copy of the device, which ends when it likes to.
inline void later(std::function<void()> copy) {
  if (fibers().seed == 0)
    copy();
  else
    fibers().under_way.push_back(std::move(copy));
}

inline void end_a_copy() {
  auto& copies = fibers().under_way;
  std::swap(copies[fibers().random() % copies.size()], copies.back());
  const auto copy = std::move(copies.back());
  copies.pop_back();
  copy();
}

inline bool can_run(int w) {
  const Fibers& f = fibers();
  const bool waits = f.blocked[w] > 0 && f.blocked[w] == f.live[w];
  return f.live[w] > 0 && !(waits && !completed(f.awaited[w].at, f.awaited[w].parity));
}

// -1: all wait.
inline int next_warp(int from) {
  Fibers& f = fibers();
  const int warps = f.count / 32;
  if (f.seed != 0 && !f.under_way.empty() && chance(0.2)) end_a_copy();
  for (;;) {
    std::vector<int> able;
    for (int i = 1; i <= warps; ++i)
      if (can_run((from + i) % warps)) able.push_back((from + i) % warps);
    if (able.empty()) {
      if (f.under_way.empty()) return -1;
      end_a_copy();
      continue;
    }
    if (f.seed == 0) return able[0];
    if (can_run(from) && chance(0.9)) return from;
    const int w = able[f.random() % able.size()];
    if (able.size() == 1 || chance(f.readiness[w])) return w;
  }
}

inline void switch_to_next() {
  Fibers& f = fibers();
  const int from = f.current;
  if ((from & 31) != 31) {
    f.current = from + 1;
  } else {
    const int w = next_warp(from / 32);
    f.stuck = w < 0;
    if (f.stuck) setcontext(&f.caller);
    f.current = 32 * w;
  }
  if (f.current != from) swapcontext(&f.threads[from], &f.threads[f.current]);
}

// The messages of a warp's lanes, once all have sent one. Lanes of a warp take turns in order, so none
// is two messages ahead.
inline const Message* exchange(const Message& own) {
  Fibers& f = fibers();
  const int me = f.current, side = f.turns[me]++ & 1;
  f.messages[side][me] = own;
  switch_to_next();
  return &f.messages[side][me & ~31];
}

// Every thread's x added up, once all have come here.
inline int block_sum(int x) {
  Fibers& f = fibers();
  const unsigned turn = f.barriers;
  f.sum[turn & 1] += x;
  if (++f.waiting == f.count) {
    f.waiting = 0;
    f.sum[(turn + 1) & 1] = 0;
    ++f.barriers;
  }
  while (f.barriers == turn) switch_to_next();
  return f.sum[turn & 1];
}

inline void block_sync() { block_sum(0); }

// The lanes of a warp meet: after it, each takes a turn before any takes two.
inline void meet() {
  Fibers& f = fibers();
  const int mine = f.current / 32;
  const unsigned turn = f.meetings[mine];
  if (++f.arrived[mine] == 32) {
    f.arrived[mine] = 0;
    ++f.meetings[mine];
  }
  while (f.meetings[mine] == turn) switch_to_next();
}

inline void make_barrier(uint64_t* at, int arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  const BarrierBits bits{count, count, 0, 0};
  std::memcpy(at, &bits, sizeof bits);
}

inline void barriers_made() {}

inline void change(uint64_t* at, int arrivals, int bytes) {
  BarrierBits bits = bits_of(at);
  if (bits.left < arrivals) std::abort();
  bits.left = static_cast<uint8_t>(bits.left - arrivals);
  bits.bytes += bytes;
  if (bits.left == 0 && bits.bytes == 0) bits.left = bits.arrivals, ++bits.phase;
  std::memcpy(at, &bits, sizeof bits);
}

inline void arrive(uint64_t* at) { change(at, 1, 0); }

inline void arrive_expecting(uint64_t* at, uint32_t bytes) { change(at, 1, static_cast<int>(bytes)); }

inline void wait(uint64_t* at, int parity) {
  Fibers& f = fibers();
  const int mine = f.current / 32;
  while (!completed(at, parity)) {
    f.awaited[mine] = {at, parity};
    ++f.blocked[mine];
    switch_to_next();
    --f.blocked[mine];
  }
  meet();
}

inline void run_thread() {
  Fibers& f = fibers();
  f.body();
  --f.live[f.current / 32];
  if (--f.left == 0) setcontext(&f.caller);
  for (;;) switch_to_next();  // its turns pass on
}

// body() in as many threads, whole warps of them, as one of some blocks. false: every warp waits for
// another one.
inline bool run(std::function<void()> body, int count = 32, int block = 0, int blocks = 1) {
  Fibers& f = fibers();
  f.block = block, f.blocks = blocks;
  std::memset(f.arrived, 0, sizeof f.arrived);
  std::memset(f.blocked, 0, sizeof f.blocked);
  f.under_way.clear();
  f.random.seed(f.seed + 1000003u * block);
  for (int w = 0; w < count / 32; ++w) {
    f.live[w] = 32;
    f.readiness[w] = chance(0.3) ? 0.01 : 1.0;  // some lag far behind the others
  }
  constexpr size_t kStack = 64 * 1024;
  f.stacks.resize(count * kStack);
  f.body = std::move(body);
  f.current = f.waiting = f.sum[0] = f.sum[1] = 0;
  f.barriers = 0;
  f.count = f.left = count;
  f.stuck = false;
  for (int i = 0; i < count; ++i) {
    f.turns[i] = 0;
    getcontext(&f.threads[i]);
    f.threads[i].uc_stack.ss_sp = f.stacks.data() + i * kStack;
    f.threads[i].uc_stack.ss_size = kStack;
    f.threads[i].uc_link = nullptr;
    makecontext(&f.threads[i], run_thread, 0);
  }
  swapcontext(&f.caller, &f.threads[0]);
  return !f.stuck;
}

}  // namespace warp
