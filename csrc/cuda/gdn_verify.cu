// Launches of gdn_verify, with a C interface: kernels/gdn_verify/cuda.py calls it through ctypes.
#include <cuda_runtime.h>

#include "gdn_step.cuh"

namespace {

template <bool kWide, int kWarps, int kBlocks, int kDepth, int kHalves, bool kPrefetch>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    direct_kernel(const __grid_constant__ gdn::Arguments x) {
  const int unit = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (unit < 2 / kHalves * x.requests * x.value_heads)
    gdn::step_direct<kWide, kDepth, kHalves, kPrefetch>(x, unit);
}

template <bool kWide, int kWarps, int kBlocks, int kBuffers>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    copied_kernel(const __grid_constant__ gdn::Arguments x) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kWarps * kBuffers];
  constexpr int kBytes = kBuffers * gdn::kHalf * gdn::kDim * (kWide ? 4 : 2);
  const int warp = threadIdx.x >> 5;
  gdn::steps_copied<kWide, kBuffers>(x, shared + warp * kBytes, barriers + warp * kBuffers,
                                     blockIdx.x * kWarps + warp, gridDim.x * kWarps,
                                     2 * x.requests * x.value_heads);
}

struct Variant {
  const char* name;
  bool wide;
  void (*kernel)(gdn::Arguments);
  int warps;
  int shared_bytes;
  int halves;         // of a head that a warp serves
  int blocks_per_sm;  // of a persistent grid; 0: one block for every `warps` items
};

template <bool kWide, int kWarps, int kBlocks, int kDepth, int kHalves = 1, bool kPrefetch = false>
constexpr Variant direct(const char* name) {
  return {name,   kWide, direct_kernel<kWide, kWarps, kBlocks, kDepth, kHalves, kPrefetch>,
          kWarps, 0,     kHalves,
          0};
}

template <bool kWide, int kWarps, int kBlocks, int kBuffers>
constexpr Variant copied(const char* name, bool persistent) {
  return {name,
          kWide,
          copied_kernel<kWide, kWarps, kBlocks, kBuffers>,
          kWarps,
          kWarps * kBuffers * gdn::kHalf * gdn::kDim * (kWide ? 4 : 2),
          1,
          persistent ? kBlocks : 0};
}

// Names say: how the state arrives, warps a block, blocks a multiprocessor, tiles ahead.
const Variant kVariants[] = {
    direct<false, 4, 3, 1>("direct w4 b3 d1"),
    direct<false, 4, 4, 1>("direct w4 b4 d1"),
    direct<false, 4, 2, 2>("direct w4 b2 d2"),
    direct<false, 4, 3, 2>("direct w4 b3 d2"),
    direct<false, 4, 2, 4>("direct w4 b2 d4"),
    direct<false, 1, 12, 2>("direct w1 b12 d2"),
    direct<false, 4, 3, 1, 1, true>("direct w4 b3 d1 L2"),
    direct<false, 4, 4, 1, 1, true>("direct w4 b4 d1 L2"),
    direct<false, 4, 2, 2, 1, true>("direct w4 b2 d2 L2"),
    direct<false, 4, 3, 1, 2, true>("direct w4 b3 d1 whole heads L2"),
    direct<false, 4, 3, 1, 2>("direct w4 b3 d1 whole heads"),
    direct<false, 4, 2, 2, 2>("direct w4 b2 d2 whole heads"),
    direct<false, 2, 6, 1, 2>("direct w2 b6 d1 whole heads"),
    direct<false, 2, 4, 4, 2>("direct w2 b4 d4 whole heads"),
    copied<false, 4, 3, 1>("copied w4 b3", false),
    copied<false, 1, 12, 1>("copied w1 b12", false),
    copied<false, 4, 3, 1>("copied w4 b3 persistent", true),
    copied<false, 1, 12, 1>("copied w1 b12 persistent", true),
    copied<false, 2, 3, 2>("copied w2 b3 2 buffers persistent", true),
    direct<true, 4, 2, 1>("direct w4 b2 d1"),
    direct<true, 4, 2, 2>("direct w4 b2 d2"),
    direct<true, 1, 8, 1>("direct w1 b8 d1"),
    direct<true, 4, 3, 1>("direct w4 b3 d1"),
    direct<true, 4, 2, 1, 1, true>("direct w4 b2 d1 L2"),
    direct<true, 4, 3, 1, 1, true>("direct w4 b3 d1 L2"),
    direct<true, 2, 4, 1, 2, true>("direct w2 b4 d1 whole heads L2"),
    direct<true, 2, 4, 1, 2>("direct w2 b4 d1 whole heads"),
    copied<true, 2, 3, 1>("copied w2 b3", false),
    copied<true, 1, 6, 1>("copied w1 b6", false),
    copied<true, 1, 6, 1>("copied w1 b6 persistent", true),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

}  // namespace

extern "C" {

int gdn_verify_variant_count() { return kVariantCount; }

const char* gdn_verify_variant_name(int variant) { return kVariants[variant].name; }

int gdn_verify_variant_is_fp32(int variant) { return kVariants[variant].wide; }

int gdn_verify_argument_bytes() { return sizeof(gdn::Arguments); }

const char* gdn_verify_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// 0, or a cudaError_t. Waits for nothing, so that it can be captured.
int gdn_verify_launch(const gdn::Arguments* arguments, int variant, int multiprocessors,
                      void* stream) {
  const Variant& v = kVariants[variant];
  if (v.shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  const int units = 2 / v.halves * arguments->requests * arguments->value_heads;
  int blocks = (units + v.warps - 1) / v.warps;
  if (v.blocks_per_sm && v.blocks_per_sm * multiprocessors < blocks)
    blocks = v.blocks_per_sm * multiprocessors;
  v.kernel<<<blocks, 32 * v.warps, v.shared_bytes, static_cast<cudaStream_t>(stream)>>>(*arguments);
  return cudaGetLastError();
}

}  // extern "C"
