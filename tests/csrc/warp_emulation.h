// csrc/cuda/warp.cuh on a CPU: a block's threads are fibers that take turns, a warp's matrix products
// are sums in double. Turns, barriers and late copies: warp_fibers.h.
//
// Registers and fragments are those of the device code, so a wrong index gives a wrong number. What is
// not shown here: races within a turn of a warp, rounding of approximate instructions, and speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "warp_fibers.h"

#define WARP_FN inline

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

namespace warp {

inline float as_float(uint32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}

inline uint32_t as_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float shuffle(float x, int from) {
  Message m{};
  m.f[0] = x;
  return exchange(m)[from].f[0];
}

inline int shuffle(int x, int from) {
  Message m{};
  m.u[0] = static_cast<uint32_t>(x);
  return static_cast<int>(exchange(m)[from].u[0]);
}

inline int64_t shuffle(int64_t x, int from) {
  Message m{};
  std::memcpy(m.u, &x, sizeof x);
  std::memcpy(&x, exchange(m)[from].u, sizeof x);
  return x;
}

inline uint32_t shuffle_pair(uint32_t x) {
  return static_cast<uint32_t>(shuffle(static_cast<int>(x), lane() ^ 1));
}

inline unsigned ballot(bool x) {
  Message m{};
  m.u[0] = x;
  const Message* all = exchange(m);
  unsigned set = 0;
  for (int i = 0; i < 32; ++i) set |= all[i].u[0] << i;
  return set;
}

inline int lowest_bit(unsigned x) { return __builtin_ctz(x); }
inline int count_bits(unsigned x) { return __builtin_popcount(x); }
inline void count_shared(int* counter) { ++*counter; }
inline float widen(float x) { return x; }
inline int round_to_int(float x) { return static_cast<int>(std::nearbyint(x)); }
inline void sync() { exchange(Message{}); }

inline void keep_order() {}

inline uint32_t round_bf16(float x) {
  const uint32_t bits = as_bits(x);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline uint32_t round_fp16(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}

inline float widen_fp16(uint32_t bits) {
  const uint16_t narrow = static_cast<uint16_t>(bits);
  _Float16 h;
  std::memcpy(&h, &narrow, 2);
  return static_cast<float>(h);
}

inline uint32_t pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
inline uint32_t pack_fp16(float low, float high) { return round_fp16(low) | round_fp16(high) << 16; }
inline float bf16_low(uint32_t x) { return as_float(x << 16); }
inline float bf16_high(uint32_t x) { return as_float(x & 0xffff0000u); }
inline float fp16_low(uint32_t x) { return widen_fp16(x & 0xffffu); }
inline float fp16_high(uint32_t x) { return widen_fp16(x >> 16); }
inline uint32_t lows(uint32_t x, uint32_t y) { return (x & 0xffffu) | y << 16; }
inline uint32_t highs(uint32_t x, uint32_t y) { return x >> 16 | (y & 0xffff0000u); }
inline uint32_t transpose(uint32_t x) {
  Message m{};
  m.u[0] = x;
  const Message* all = exchange(m);
  const int row = lane() / 4, column = 2 * (lane() % 4);  // of the result
  const auto number = [&](int from_row) {
    const uint32_t pair = all[4 * from_row + row / 2].u[0];
    return row % 2 ? pair >> 16 : pair & 0xffffu;
  };
  return number(column) | number(column + 1) << 16;
}
inline float tf32_head(float x) { return as_float(as_bits(x) & 0xffffe000u); }
inline float clamp_half(float x) { return std::fmin(std::fmax(x, -65504.0f), 65504.0f); }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }

// c += a b from the fragments that the PTX manual gives for m16n8; `wide` K columns come in two halves.
template <typename A, typename B>
inline void multiply(float (&c)[4], const Message& own, int depth, A a_of, B b_of) {
  const int g = lane() >> 2, q = lane() & 3;
  const Message* all = exchange(own);
  for (int n = 0; n < 4; ++n) {
    const int row = g + 8 * (n >> 1), column = 2 * q + (n & 1);
    double sum = c[n];
    for (int k = 0; k < depth; ++k)
      sum += static_cast<double>(a_of(all, row, k)) * b_of(all, k, column);
    c[n] = static_cast<float>(sum);
  }
}

template <float (*low)(uint32_t), float (*high)(uint32_t)>
inline void multiply_16bit(float (&c)[4], const Message& own, int depth) {
  multiply(
      c, own, depth,
      [](const Message* all, int row, int k) {
        const uint32_t pair = all[4 * (row & 7) + (k & 7) / 2].u[(row >> 3) + 2 * (k >> 3)];
        return k & 1 ? high(pair) : low(pair);
      },
      [](const Message* all, int k, int column) {
        const uint32_t pair = all[4 * column + (k & 7) / 2].u[4 + (k >> 3)];
        return k & 1 ? high(pair) : low(pair);
      });
}

inline Message message16(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                         uint32_t b1) {
  Message m{};
  const uint32_t u[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(m.u, u, sizeof u);
  return m;
}

inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  multiply_16bit<bf16_low, bf16_high>(c, message16(a0, a1, a2, a3, b0, b1), 16);
}

inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  multiply_16bit<bf16_low, bf16_high>(c, message16(a0, a1, 0, 0, b0, 0), 8);
}

inline void mma_fp16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  multiply_16bit<fp16_low, fp16_high>(c, message16(a0, a1, a2, a3, b0, b1), 16);
}

inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  Message m{};
  const float f[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; ++i) m.f[i] = tf32_head(f[i]);
  multiply(
      c, m, 8,
      [](const Message* all, int row, int k) {
        return all[4 * (row & 7) + (k & 3)].f[(row >> 3) + 2 * (k >> 2)];
      },
      [](const Message* all, int k, int column) { return all[4 * column + (k & 3)].f[4 + (k >> 2)]; });
}

template <typename T>
inline T load(const void* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
inline uint4 load_stream(const void* at) { return load<uint4>(at); }
inline int load_now(const int* at) { return *at; }

// What each lane has loaded by 16 bytes, in turn, where somebody asks.
inline std::vector<uintptr_t>* loaded16 = nullptr;

inline uint4 load16(const void* at) {
  if (loaded16 != nullptr) loaded16[lane()].push_back(reinterpret_cast<uintptr_t>(at));
  return load<uint4>(at);
}
inline uint2 load8(const void* at) { return load<uint2>(at); }
inline uint32_t load4(const void* at) { return load<uint32_t>(at); }
inline void store16(void* at, uint4 x) { std::memcpy(at, &x, sizeof x); }
inline void store4(void* at, uint32_t x) { std::memcpy(at, &x, sizeof x); }
inline void store8(void* at, uint2 x) { std::memcpy(at, &x, sizeof x); }

// Groups of copies arrive when they are waited for, no sooner: who reads too early sees it.
struct Groups {
  struct Copy {
    void* to;
    uint4 words;
  };
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> ended;
};

inline Groups& groups() {
  static std::vector<Groups> all(kMaxThreads);
  return all[fibers().current];
}

inline void copy16(void* to, const void* from) { groups().open.push_back({to, load<uint4>(from)}); }

inline void end_group() {
  groups().ended.push_back(std::move(groups().open));
  groups().open.clear();
}

template <int kLater>
inline void wait_groups() {
  auto& ended = groups().ended;
  for (; ended.size() > kLater; ended.pop_front())
    for (const auto& copy : ended.front()) store16(copy.to, copy.words);
}

inline void arrive_after_copies(uint64_t* at) {
  later([at, copies = std::exchange(groups().open, {})] {
    for (const auto& copy : copies) store16(copy.to, copy.words);
    arrive(at);
  });
}

inline void copy_for(void* to, const void* from, uint32_t bytes, uint64_t* at) {
  later([=] {
    std::memcpy(to, from, bytes);
    change(at, 0, -static_cast<int>(bytes));
  });
}

}  // namespace warp
