// Launch of pack_rows, with a C interface: kernels/pack_rows/cuda.py calls it through ctypes.
#include <cuda_runtime.h>

#include "pack_rows.cuh"

namespace {

template <typename Score, int kPositions>
__global__ void __launch_bounds__(pack::kMaxRequests)
    pack_kernel(const __grid_constant__ pack::Arguments x) {
  __shared__ pack::Shared shared;
  pack::pack_rows<Score, kPositions>(x, shared);
}

template <typename Score>
void launch(const pack::Arguments& x, int threads, cudaStream_t stream) {
  if (x.positions <= 8)
    pack_kernel<Score, 8><<<1, threads, 0, stream>>>(x);
  else
    pack_kernel<Score, 16><<<1, threads, 0, stream>>>(x);
}

}  // namespace

extern "C" {

int pack_rows_argument_bytes() { return sizeof(pack::Arguments); }

// score_type: 0 fp32, 1 fp16, 2 bf16. Returns 0, or a cudaError_t.
int pack_rows_launch(const pack::Arguments* arguments, int score_type, void* stream) {
  const int threads = (arguments->requests + 31) / 32 * 32;
  const auto on = static_cast<cudaStream_t>(stream);
  if (score_type == 0)
    launch<float>(*arguments, threads, on);
  else if (score_type == 1)
    launch<__half>(*arguments, threads, on);
  else
    launch<__nv_bfloat16>(*arguments, threads, on);
  return cudaGetLastError();
}

}  // extern "C"
