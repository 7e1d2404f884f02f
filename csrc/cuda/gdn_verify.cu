// Launches of gdn_verify, with a C interface: kernels/gdn_verify/cuda.py calls it through ctypes.
#include <cuda_runtime.h>

#include <algorithm>

#include "gdn_pipeline.cuh"
#include "gdn_step.cuh"

namespace {

template <bool kWide, int kWarps, int kBlocks, int kDepth>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    direct_kernel(const __grid_constant__ gdn::Arguments x) {
  const int head = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (head < x.requests * x.value_heads) gdn::step_direct<kWide, kDepth>(x, head);
}

template <bool kWide, int kWarps, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    streamed_kernel(const __grid_constant__ gdn::Arguments x) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x >> 5, head = blockIdx.x * kWarps + warp;
  if (head < x.requests * x.value_heads)
    gdn::step_streamed<kWide>(x, shared + warp * gdn::Stream<kWide>::kBytes, head);
}

template <bool kWide, typename Shared>
__global__ void __launch_bounds__(32 * Shared::kWarps, 1)
    pipeline_kernel(const __grid_constant__ gdn::Arguments x) {
  extern __shared__ __align__(128) char shared[];
  gdn::run_pipeline<kWide>(x, *reinterpret_cast<Shared*>(shared));
}

struct Variant {
  const char* name;
  bool wide;
  void (*kernel)(gdn::Arguments);
  int warps;
  int blocks_per_sm;
  int shared_bytes;
  bool stays;  // as many blocks as the device has room for; otherwise a warp has one head
  void (*single)(gdn::Arguments) = nullptr;  // where an odd number of value heads has a key head
};

template <bool kWide, int kWarps, int kBlocks, int kDepth>
constexpr Variant direct(const char* name) {
  return {name, kWide, direct_kernel<kWide, kWarps, kBlocks, kDepth>, kWarps, kBlocks, 0, false};
}

template <bool kWide, int kWarps, int kBlocks>
constexpr Variant streamed(const char* name) {
  return {name,   kWide,   streamed_kernel<kWide, kWarps, kBlocks>,
          kWarps, kBlocks, kWarps * gdn::Stream<kWide>::kBytes,
          false};
}

// Two value heads of a key head at a time, or one where they are odd in number.
template <bool kWide, int... kCut>
constexpr Variant pipeline(const char* name) {
  using Pairs = gdn::PipelineShared<kWide, kCut..., 2>;
  using Singles = gdn::PipelineShared<kWide, kCut..., 1>;
  static_assert(sizeof(Pairs) <= 227 * 1024 && sizeof(Singles) <= sizeof(Pairs),
                "shared memory of a block");
  return {name, kWide, pipeline_kernel<kWide, Pairs>, Pairs::kWarps, 1,
          sizeof(Pairs), true, pipeline_kernel<kWide, Singles>};
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

int grid_of(const Variant& v, const gdn::Arguments& x) {
  const int heads = x.requests * x.value_heads;
  if (v.stays) return std::min(heads, v.blocks_per_sm * multiprocessors());
  return (heads + v.warps - 1) / v.warps;
}

// Of each state type the one for many requests first, then the one for few, then those that are not
// picked; figures of these and of those that lost: docs/kernels/gdn_verify.md. Names say: how the state
// arrives, warps a block, blocks a multiprocessor, tiles ahead; of a pipeline the warps that solve
// systems, the stages, the warps that copy (one).
const Variant kVariants[] = {
    pipeline<false, 3, 5, 1, 1, 2>("pipeline s3 r5 c1"),
    direct<false, 4, 2, 2>("direct w4 b2 d2 whole heads"),
    pipeline<true, 3, 8, 4, 2, 3>("pipeline s3 r8 c1 quarters"),
    direct<true, 2, 4, 1>("direct w2 b4 d1 whole heads"),
    streamed<false, 4, 3>("streamed w4 b3"),
    streamed<true, 2, 3>("streamed w2 b3"),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

}  // namespace

extern "C" {

int gdn_verify_variant_count() { return kVariantCount; }

const char* gdn_verify_variant_name(int variant) { return kVariants[variant].name; }

int gdn_verify_variant_is_fp32(int variant) { return kVariants[variant].wide; }

// Value heads that the launch cut has in work at once on one multiprocessor.
int gdn_verify_variant_heads(int variant) {
  const Variant& v = kVariants[variant];
  return v.stays ? 0 : v.warps * v.blocks_per_sm;
}

int gdn_verify_argument_bytes() { return sizeof(gdn::Arguments); }

const char* gdn_verify_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// 0, or a cudaError_t. Waits for nothing, so that it can be captured.
int gdn_verify_launch(const gdn::Arguments* arguments, int variant, void* stream) {
  const Variant& v = kVariants[variant];
  const auto kernel = v.single != nullptr && arguments->group % 2 != 0 ? v.single : v.kernel;
  if (v.shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid_of(v, *arguments), 32 * v.warps, v.shared_bytes,
             static_cast<cudaStream_t>(stream)>>>(*arguments);
  return cudaGetLastError();
}

}  // extern "C"
