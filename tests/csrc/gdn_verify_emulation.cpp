// csrc/cuda/gdn_step.cuh run by emulated warps, behind the C interface of gdn_verify.cu.
#define GDN_WARP_EMULATION
#include "gdn_pipeline.cuh"
#include "gdn_step.cuh"

#include <memory>

namespace {

struct Variant {
  const char* name;
  bool wide;
  void (*run)(const gdn::Arguments&);
};

template <bool kWide, int kDepth>
void direct(const gdn::Arguments& x) {
  for (int head = 0; head < x.requests * x.value_heads; ++head)
    warp::run([&] { gdn::step_direct<kWide, kDepth>(x, head); });
}

template <bool kWide>
void copied(const gdn::Arguments& x) {
  std::vector<char> buffer(gdn::kHalf * gdn::kDim * gdn::StateTile<kWide>::kStateBytes);
  uint64_t barrier;
  for (int unit = 0; unit < 2 * x.requests * x.value_heads; ++unit)
    warp::run([&] { gdn::step_copied<kWide>(x, buffer.data(), &barrier, unit); });
}

template <bool kWide>
void streamed(const gdn::Arguments& x) {
  std::vector<char> buffer(gdn::Stream<kWide>::kBytes, 0x55);
  for (int head = 0; head < x.requests * x.value_heads; ++head)
    warp::run([&] { gdn::step_streamed<kWide>(x, buffer.data(), head); });
}

// Few warps and stages, so that they are used again and again.
template <bool kWide, int kTilesOfWarp>
void pipeline(const gdn::Arguments& x) {
  constexpr int kSystemWarps = 2, kStages = 3, kParts = kWide ? 2 : 1, kBlocks = 2;
  using Shared = gdn::PipelineShared<kWide, kSystemWarps, kStages, kParts, kTilesOfWarp>;
  const auto shared = std::make_unique<Shared>();
  for (int block = 0; block < kBlocks; ++block) {
    std::memset(static_cast<void*>(shared.get()), 0x55, sizeof(Shared));
    warp::run([&] { gdn::run_pipeline<kWide>(x, *shared); },
              32 * (gdn::kTileWarps + kSystemWarps + 1), block, kBlocks);
  }
}

const Variant kVariants[] = {
    {"copied", false, copied<false>},
    {"direct d2", false, direct<false, 2>},
    {"pipeline t1", false, pipeline<false, 1>},
    {"pipeline t2", false, pipeline<false, 2>},
    {"streamed", false, streamed<false>},
    {"copied", true, copied<true>},
    {"direct d1", true, direct<true, 1>},
    {"pipeline t1", true, pipeline<true, 1>},
    {"pipeline t2", true, pipeline<true, 2>},
    {"streamed", true, streamed<true>},
};

}  // namespace

extern "C" {

int gdn_verify_variant_count() { return sizeof(kVariants) / sizeof(kVariants[0]); }

const char* gdn_verify_variant_name(int variant) { return kVariants[variant].name; }

int gdn_verify_variant_is_fp32(int variant) { return kVariants[variant].wide; }

int gdn_verify_variant_heads(int) { return 8; }

int gdn_verify_argument_bytes() { return sizeof(gdn::Arguments); }

const char* gdn_verify_error(int) { return "none"; }

int gdn_verify_launch(const gdn::Arguments* arguments, int variant, void*) {
  kVariants[variant].run(*arguments);
  return 0;
}

}  // extern "C"
