// The small system of one value head and up to 8 rows, held by one warp. Mathematics: replay_naive.py.
//
// Lane 4 g + c of a warp holds row g (of K, and of Q) and columns 2 c and 2 c + 1 of every 8 x 8
// table, which is where the matrix unit leaves an accumulator and takes a right operand.
#pragma once

#include "warp.cuh"

namespace gdn {

constexpr int kRows = 8;      // rows of a step
constexpr int kRing = 32;     // most rows of a ring: one a lane
constexpr int kDim = 128;     // dk and dv
constexpr float kNormEpsilon = 1e-6f;
constexpr float kSoftplusLinear = 20.0f;

// K and Q of a key head, as given. Chunk i of a lane: a power-of-two run of channels, the same
// channels of a state row that the lane reads (the order of a dot product is free).
struct Rows {
  uint32_t k[16];
  uint32_t q[16];
};

// What each product with K and Q shares within a key head; two columns a lane.
struct Products {
  float kk[2], qk[2];             // k_g . k_c, q_g . k_c
  float k_norm, q_norm;           // 1 / |k_g|, and scale / |q_g|
  float k_norm_of[2], q_norm_of[2];  // the same of the lane's columns
};

WARP_FN void multiply_rows(const Rows& rows, const uint32_t* right, float (&c)[4]) {
  float odd[4] = {};  // of odd steps: a product waits for the one before it
#pragma unroll
  for (int s = 0; s < 8; ++s)
    warp::mma_bf16(s & 1 ? odd : c, rows.k[2 * s], rows.q[2 * s], rows.k[2 * s + 1], rows.q[2 * s + 1],
                   right[2 * s], right[2 * s + 1]);
#pragma unroll
  for (int n = 0; n < 4; ++n) c[n] += odd[n];
}

WARP_FN Products products_of(const Rows& rows, float scale) {
  const int lane = warp::lane(), g = lane >> 2, c = lane & 3;
  float with_k[4] = {}, with_q[4] = {};
  multiply_rows(rows, rows.k, with_k);
  multiply_rows(rows, rows.q, with_q);
  Products p;
  p.kk[0] = with_k[0], p.kk[1] = with_k[1];
  p.qk[0] = with_k[2], p.qk[1] = with_k[3];
  const float k_norm = warp::inverse_root((g & 1 ? with_k[1] : with_k[0]) + kNormEpsilon);
  const float q_norm = warp::inverse_root((g & 1 ? with_q[3] : with_q[2]) + kNormEpsilon) * scale;
  p.k_norm = warp::shuffle(k_norm, 4 * g + (g >> 1));
  p.q_norm = warp::shuffle(q_norm, 4 * g + (g >> 1));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    p.k_norm_of[e] = warp::shuffle(k_norm, 4 * (2 * c + e) + c);
    p.q_norm_of[e] = warp::shuffle(q_norm, 4 * (2 * c + e) + c);
  }
  return p;
}

struct Gates {
  float log_decay, beta;  // of row lane % 8
};

WARP_FN Gates gates_of(float a, float b, float dt_bias, float A_log, bool real) {
  const float x = a + dt_bias;
  const float softplus = x > kSoftplusLinear ? x : log1pf(expf(x));
  return {real ? -expf(A_log) * softplus : 0.0f, 1.0f / (1.0f + expf(-b))};
}

// The solved system of a head: [U; O - Y_Q] = [inverse; carry] b (V - Y_K).
struct System {
  float inverse[2], carry[2];        // row g, two columns
  float running;                     // log decay from the step's start to row g
  float from_start_k[2], from_start_q[2];  // decay times norm of the lane's columns
  float beta[2];                     // of the lane's columns
};

// Column 2 c + e and row g: decay and products before elimination.
struct SystemTables {
  float lower[2], cross[2];
};

WARP_FN System begin_system(const Products& p, const Gates& gates, SystemTables& tables) {
  const int lane = warp::lane(), g = lane >> 2, c = lane & 3;
  float decay[kRows];
#pragma unroll
  for (int m = 0; m < kRows; ++m) decay[m] = warp::shuffle(gates.log_decay, m);

  System s;
  const float beta_g = warp::shuffle(gates.beta, g);
  float between[2] = {}, running_of[2] = {};
  s.running = 0.0f;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    s.running += m <= g ? decay[m] : 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * c + e;
      // A sum over the rows between: the difference of two running sums loses a weak decay's digits.
      between[e] += m > column && m <= g ? decay[m] : 0.0f;
      running_of[e] += m <= column ? decay[m] : 0.0f;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int column = 2 * c + e;
    const float from_column = expf(between[e]) * p.k_norm_of[e];
    tables.lower[e] = column < g ? -beta_g * p.kk[e] * p.k_norm * from_column : 0.0f;
    tables.cross[e] = column <= g ? p.qk[e] * p.q_norm * from_column : 0.0f;
    s.inverse[e] = column == g ? 1.0f : 0.0f;
    s.carry[e] = 0.0f;
    const float from_start = expf(running_of[e]);
    s.from_start_k[e] = p.k_norm_of[e] * from_start;
    s.from_start_q[e] = p.q_norm_of[e] * from_start;
    s.beta[e] = warp::shuffle(gates.beta, column);
  }
  return s;
}

// Systems of value heads that share a key head, in step: each one's steps wait for one another.
template <int kHeads>
WARP_FN void solve(const Products& p, const Gates (&gates)[kHeads], int num_rows,
                   System (&systems)[kHeads]) {
  const int lane = warp::lane(), c = lane & 3;
  SystemTables tables[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) systems[h] = begin_system(p, gates[h], tables[h]);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if (j >= num_rows) break;
    const int holder = (lane & ~3) | (j >> 1);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      System& s = systems[h];
      const float on_k = warp::shuffle(tables[h].lower[j & 1], holder);
      const float on_q = warp::shuffle(tables[h].cross[j & 1], holder);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float pivot = warp::shuffle(s.inverse[e], 4 * j + c);
        s.inverse[e] += on_k * pivot;
        s.carry[e] += on_q * pivot;
      }
    }
  }
}

// Lane j: what follows pending row j until the step starts.
struct Pending {
  float weight;  // 1 / |k_j| times the decay after it
  float total;   // log decay of all pending rows
};

WARP_FN Pending pending_of(float log_decay, float key_norm) {
  const int lane = warp::lane();
  const float next = warp::shuffle(log_decay, (lane + 1) & 31);
  float after = lane < 31 ? next : 0.0f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float further = warp::shuffle(after, (lane + step) & 31);
    after += lane + step < 32 ? further : 0.0f;
  }
  return {key_norm * expf(after), warp::shuffle(after + log_decay, 0)};
}

}  // namespace gdn
