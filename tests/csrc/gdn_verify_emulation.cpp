// csrc/cuda/gdn_step.cuh run by emulated warps, behind the C interface of gdn_verify.cu.
#define GDN_WARP_EMULATION
#include "gdn_step.cuh"

namespace {

struct Variant {
  const char* name;
  bool wide;
  void (*run)(const gdn::Arguments&, int);
};

template <bool kWide, int kDepth, int kHalves>
void direct(const gdn::Arguments& x, int units) {
  for (int unit = 0; unit < units / kHalves; ++unit)
    warp::run([&] { gdn::step_direct<kWide, kDepth, kHalves, true>(x, unit); });
}

// Three persistent warps.
template <bool kWide, int kBuffers>
void copied(const gdn::Arguments& x, int units) {
  constexpr int kWarps = 3;
  std::vector<char> buffers(kBuffers * gdn::kHalf * gdn::kDim * gdn::StateTile<kWide>::kStateBytes);
  uint64_t barriers[kBuffers];
  for (int first = 0; first < kWarps; ++first)
    warp::run([&] {
      gdn::steps_copied<kWide, kBuffers>(x, buffers.data(), barriers, first, kWarps, units);
    });
}

const Variant kVariants[] = {
    {"direct d1", false, direct<false, 1, 1>},
    {"direct d2", false, direct<false, 2, 1>},
    {"direct d1 whole heads", false, direct<false, 1, 2>},
    {"direct d4 whole heads", false, direct<false, 4, 2>},
    {"copied 1 buffer", false, copied<false, 1>},
    {"copied 2 buffers", false, copied<false, 2>},
    {"direct d2", true, direct<true, 2, 1>},
    {"direct d1 whole heads", true, direct<true, 1, 2>},
    {"copied 1 buffer", true, copied<true, 1>},
};

}  // namespace

extern "C" {

int gdn_verify_variant_count() { return sizeof(kVariants) / sizeof(kVariants[0]); }

const char* gdn_verify_variant_name(int variant) { return kVariants[variant].name; }

int gdn_verify_variant_is_fp32(int variant) { return kVariants[variant].wide; }

int gdn_verify_argument_bytes() { return sizeof(gdn::Arguments); }

const char* gdn_verify_error(int) { return "none"; }

int gdn_verify_launch(const gdn::Arguments* arguments, int variant, int, void*) {
  kVariants[variant].run(*arguments, 2 * arguments->requests * arguments->value_heads);
  return 0;
}

}  // extern "C"
