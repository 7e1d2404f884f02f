// csrc/cuda/gdn_step.cuh and gdn_pipeline.cuh run by emulated warps, behind the C interface of
// gdn_verify.cu.
#define GDN_WARP_EMULATION
#include "gdn_pipeline.cuh"
#include "gdn_step.cuh"

#include <algorithm>
#include <memory>

namespace {

struct Variant {
  const char* name;
  bool wide;
  bool (*run)(const gdn::Arguments&);  // false: it hangs
};

template <bool kWide, int kDepth>
bool direct(const gdn::Arguments& x) {
  for (int head = 0; head < x.requests * x.value_heads; ++head)
    warp::run([&] { gdn::step_direct<kWide, kDepth>(x, head); });
  return true;
}

template <bool kWide>
bool streamed(const gdn::Arguments& x) {
  std::vector<char> buffer(gdn::Stream<kWide>::kBytes, 0x55);
  for (int head = 0; head < x.requests * x.value_heads; ++head)
    warp::run([&] { gdn::step_streamed<kWide>(x, buffer.data(), head); });
  return true;
}

template <bool kWide, int... kCut>
bool pipeline_of(const gdn::Arguments& x) {
  constexpr int kBlocks = 2;
  using Shared = gdn::PipelineShared<kWide, kCut...>;
  const auto shared = std::make_unique<Shared>();
  for (int block = 0; block < kBlocks; ++block) {
    std::memset(static_cast<void*>(shared.get()), 0x55, sizeof(Shared));
    if (!warp::run([&] { gdn::run_pipeline<kWide>(x, *shared); }, 32 * Shared::kWarps, block, kBlocks))
      return false;
  }
  return true;
}

template <bool kWide, int... kCut>
bool pipeline(const gdn::Arguments& x) {
  return x.group % 2 == 0 ? pipeline_of<kWide, kCut..., 2>(x) : pipeline_of<kWide, kCut..., 1>(x);
}

// In the order of gdn_verify.cu, and pipelines with fewer warps and stages, or with two groups.
const Variant kVariants[] = {
    {"pipeline s7 r3 c1", false, pipeline<false, 7, 3, 1, 1, 3>},
    {"direct d2", false, direct<false, 2>},
    {"pipeline s3 r8 c1 quarters", true, pipeline<true, 3, 8, 4, 2, 3>},
    {"direct d1", true, direct<true, 1>},
    {"pipeline s6 r3 c1", false, pipeline<false, 6, 3, 1, 1, 3>},
    {"pipeline s5 r4 c1", false, pipeline<false, 5, 4, 1, 1, 3>},
    {"pipeline s3 r5 c1", false, pipeline<false, 3, 5, 1, 1, 2>},
    {"pipeline s3 r4 c1, two groups", false, pipeline<false, 3, 4, 1, 2, 2>},
    {"streamed", false, streamed<false>},
    {"pipeline s2 r4 c1 halves", true, pipeline<true, 2, 4, 2, 1, 2>},
    {"streamed", true, streamed<true>},
};

// As the shared memory of a device has them, by addresses within the stage.
int lanes_in_a_bank(const std::vector<uintptr_t> (&loads)[32], const char* stage) {
  const auto begin = reinterpret_cast<uintptr_t>(stage);
  int most = 0;
  for (size_t i = 0; i < loads[0].size(); ++i)
    for (int quarter = 0; quarter < 32; quarter += 8) {
      int lanes[8] = {};  // of each four banks, which 16 bytes lie in
      for (int lane = quarter; lane < quarter + 8; ++lane)
        most = std::max(most, ++lanes[(loads[lane].at(i) - begin) / 16 % 8]);
    }
  return most;
}

template <bool kWide>
int lanes_in_a_bank() {
  using Rows = gdn::StateRows<kWide>;
  std::vector<char> stage(gdn::kDim / Rows::kRowsOfGroup * Rows::kGroupStride);
  int most = 0;
  for (int tile = 0; tile < gdn::kTilesOfHead; ++tile) {
    std::vector<uintptr_t> loads[32];
    warp::loaded16 = loads;
    warp::run([&] {
      gdn::StateTile<kWide> state;
      state.load_shared(stage.data() + Rows::offset(Rows::lane_row(tile)));
    });
    warp::loaded16 = nullptr;
    most = std::max(most, lanes_in_a_bank(loads, stage.data()));
  }
  return most;
}

}  // namespace

extern "C" {

// Of the eight lanes that shared memory serves at once, the most that meet when a tile's state is read;
// 0: nothing was read.
int gdn_verify_lanes_in_a_bank(int wide) {
  return wide ? lanes_in_a_bank<true>() : lanes_in_a_bank<false>();
}

int gdn_verify_variant_count() { return sizeof(kVariants) / sizeof(kVariants[0]); }

const char* gdn_verify_variant_name(int variant) { return kVariants[variant].name; }

int gdn_verify_variant_is_fp32(int variant) { return kVariants[variant].wide; }

int gdn_verify_variant_heads(int) { return 8; }

int gdn_verify_argument_bytes() { return sizeof(gdn::Arguments); }

// Of the turns of warps and of copies; 0: in order.
void gdn_verify_schedule(unsigned seed) { warp::fibers().seed = seed; }

const char* gdn_verify_error(int) { return "every warp waits for another one"; }

int gdn_verify_launch(const gdn::Arguments* arguments, int variant, void*) {
  return kVariants[variant].run(*arguments) ? 0 : 1;
}

}  // extern "C"
