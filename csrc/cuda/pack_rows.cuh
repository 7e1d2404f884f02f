// Which draft rows are verified: the best n of a batch, in one block with a thread for each request.
// Contract: kernels/pack_rows/__init__.py.
//
// The n-th best level is found by two histograms of 8 bits each; rows at that level go by position,
// then request.
#pragma once

#include "warp.cuh"

namespace pack {

constexpr int kMaxRequests = 1024, kMaxWarps = 32, kMaxPositions = 16, kGridBits = 16, kBins = 256;

struct Arguments {
  const void* scores;  // [rows, positions]
  const int *score_rows, *draft_counts, *caps, *base_rows;  // score_rows and caps may be null
  const int *budget_at, *requests_at;                       // null: `budget`, `real_requests`
  int *draft_lengths, *query_start_loc, *cu_num_logits;
  int64_t score_stride;
  int32_t budget, real_requests, requests, positions;
  int32_t start_loc_size, logits_size, bonus_tokens, is_product;
};

struct Shared {
  int bins[2][kBins];
  int chosen[2], rest[2];                      // by each histogram: the bin, and rows still wanted
  int ties[kMaxPositions][kMaxWarps];          // at the n-th level, then those of earlier warps
  int ties_of[kMaxPositions];
  int64_t sums[kMaxWarps];
};

// Units of 2^-16, halves to even; 0 for NaN and for what is outside [0, 1].
WARP_FN int to_grid(float chance) {
  const float clean = chance >= 0.0f && chance <= 1.0f ? chance : 0.0f;
  const int rounded = warp::round_to_int(clean * (1 << kGridBits));
  return rounded < (1 << kGridBits) ? rounded : (1 << kGridBits) - 1;
}

// Sum over the warp's lanes up to and with this one.
template <typename T>
WARP_FN T running_sum(T x) {
  const int lane = warp::lane();
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = warp::shuffle(x, (lane - step) & 31);
    x += lane >= step ? before : 0;
  }
  return x;
}

// By warp 0: the highest bin such that it and the bins above it hold `wanted` rows.
WARP_FN void choose_bin(const int* bins, int wanted, int* chosen, int* rest) {
  const int lane = warp::lane();
  // Lane 0 has the highest eight bins.
  const int top = kBins - 1 - 8 * lane;
  int own[8], total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += own[i] = bins[top - i];
  int above = running_sum(total) - total;
  if (above >= wanted || above + total < wanted) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (above < wanted && above + own[i] >= wanted) *chosen = top - i, *rest = wanted - above;
    above += own[i];
  }
}

// 0, the running sums of lengths, then the total up to `size`.
WARP_FN void write_offsets(int* at, int size, int request, int requests, int end, int total) {
  if (request == 0) at[0] = 0;
  if (request < requests) at[1 + request] = end;
  for (int i = 1 + requests + request; i < size; i += warp::block_size()) at[i] = total;
}

template <typename Score, int kPositions>
WARP_FN void pack_rows(const Arguments& x, Shared& shared) {
  const int request = warp::thread(), lane = warp::lane(), mine = request / 32;
  const int budget = x.budget_at ? *x.budget_at : x.budget;
  const int real_requests = x.requests_at ? *x.requests_at : x.real_requests;
  for (int i = request; i < 2 * kBins; i += warp::block_size()) shared.bins[i / kBins][i % kBins] = 0;

  int base = 0, limit = 0;
  if (request < x.requests && request < real_requests) {
    base = x.base_rows[request];
    limit = x.draft_counts[request];
    if (x.caps && x.caps[request] < limit) limit = x.caps[request];
    limit = limit < 0 ? 0 : limit < x.positions ? limit : x.positions;
  }
  int level[kPositions];
  const int64_t row = limit > 0 && x.score_rows ? x.score_rows[request] : request;
  float score[kPositions];
#pragma unroll
  for (int i = 0; i < kPositions; ++i)
    score[i] = i < limit
                   ? warp::widen(static_cast<const Score*>(x.scores)[row * x.score_stride + i])
                   : 0.0f;
  unsigned running = 1u << kGridBits;
#pragma unroll
  for (int i = 0; i < kPositions; ++i) {
    const unsigned chance = to_grid(score[i]);
    if (x.is_product)
      running = i == 0 ? chance : (running * chance) >> kGridBits;
    else
      running = chance < running ? chance : running;
    level[i] = i < limit ? static_cast<int>(running) : -1;
  }
  const int eligible = static_cast<int>(warp::block_sum(limit));  // a barrier: bins are zero now
  int length = limit;
  if (budget < eligible) {
    length = 0;
    if (budget > 0) {
#pragma unroll
      for (int i = 0; i < kPositions; ++i)
        if (level[i] >= 0) warp::count_shared(&shared.bins[0][level[i] >> 8]);
      warp::block_sync();
      if (mine == 0) choose_bin(shared.bins[0], budget, &shared.chosen[0], &shared.rest[0]);
      warp::block_sync();
      const int high = shared.chosen[0];
#pragma unroll
      for (int i = 0; i < kPositions; ++i)
        if (level[i] >= 0 && level[i] >> 8 == high)
          warp::count_shared(&shared.bins[1][level[i] & 255]);
      warp::block_sync();
      if (mine == 0)
        choose_bin(shared.bins[1], shared.rest[0], &shared.chosen[1], &shared.rest[1]);
      warp::block_sync();
      const int last = high << 8 | shared.chosen[1];
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        length += level[i] > last;
        const unsigned tied = warp::ballot(level[i] == last);
        if (lane == 0) shared.ties[i][mine] = warp::count_bits(tied);
      }
      warp::block_sync();
      for (int i = mine; i < kPositions; i += warp::block_size() / 32) {
        const int count = lane < warp::block_size() / 32 ? shared.ties[i][lane] : 0;
        const int upto = running_sum(count);
        shared.ties[i][lane] = upto - count;
        if (lane == 31) shared.ties_of[i] = upto;
      }
      warp::block_sync();
      int places = shared.rest[1];
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        const bool is_tied = level[i] == last;
        const unsigned tied = warp::ballot(is_tied);
        const int rank = shared.ties[i][mine] + warp::count_bits(tied & ((1u << lane) - 1));
        length += is_tied && rank < places;
        places -= shared.ties_of[i];
      }
    }
  }
  if (request < x.requests) x.draft_lengths[request] = length;
  const int logits = length + (base > 0 ? x.bonus_tokens : 0);
  const int64_t both = static_cast<int64_t>(logits) << 32 | static_cast<uint32_t>(base + length);
  const int64_t within = running_sum(both);
  if (lane == 31) shared.sums[mine] = within;
  warp::block_sync();
  const int64_t of_warp = lane < warp::block_size() / 32 ? shared.sums[lane] : 0;
  const int64_t upto = running_sum(of_warp);
  const int64_t end = within + warp::shuffle(upto - of_warp, mine);
  const int64_t total = warp::shuffle(upto, 31);
  write_offsets(x.query_start_loc, x.start_loc_size, request, x.requests,
                static_cast<int>(end & 0xffffffff), static_cast<int>(total & 0xffffffff));
  write_offsets(x.cu_num_logits, x.logits_size, request, x.requests, static_cast<int>(end >> 32),
                static_cast<int>(total >> 32));
}

}  // namespace pack
