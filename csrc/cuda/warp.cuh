// What a warp does together, for sm_80 and later: shuffles, 16-bit and tf32 matrix products, loads.
//
// tests/csrc/warp_emulation.h offers the same names on a CPU, so that the kernels can be checked
// against the oracle on a host without a GPU.
#pragma once

#ifdef GDN_WARP_EMULATION
#include "warp_emulation.h"
#else

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define WARP_FN __device__ __forceinline__

namespace warp {

WARP_FN int lane() { return threadIdx.x & 31; }

WARP_FN float shuffle(float x, int from) { return __shfl_sync(0xffffffffu, x, from); }

WARP_FN int shuffle(int x, int from) { return __shfl_sync(0xffffffffu, x, from); }

WARP_FN int64_t shuffle(int64_t x, int from) {
  return __shfl_sync(0xffffffffu, static_cast<long long>(x), from);
}

// That of the lane whose number differs in its last bit.
WARP_FN uint32_t shuffle_pair(uint32_t x) { return __shfl_xor_sync(0xffffffffu, x, 1); }

WARP_FN unsigned ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

WARP_FN int count_bits(unsigned x) { return __popc(x); }

WARP_FN void sync() { __syncwarp(); }

// Of a block of one dimension.
WARP_FN int thread() { return threadIdx.x; }

WARP_FN int block_size() { return blockDim.x; }

WARP_FN void block_sync() { __syncthreads(); }

WARP_FN int block() { return blockIdx.x; }

WARP_FN int blocks() { return gridDim.x; }

// x is not 0.
WARP_FN int lowest_bit(unsigned x) { return __ffs(x) - 1; }

// Sum over the block, and a barrier. x < 32.
WARP_FN int block_sum(int x) {
  int total = 0;
#pragma unroll
  for (int bit = 0; bit < 5; ++bit) total += __syncthreads_count(x >> bit & 1) << bit;
  return total;
}

WARP_FN void count_shared(int* counter) { atomicAdd(counter, 1); }

WARP_FN float widen(float x) { return x; }

WARP_FN float widen(__half x) { return __half2float(x); }

WARP_FN float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Halves to even.
WARP_FN int round_to_int(float x) { return __float2int_rn(x); }

// The compiler moves no access to memory across it.
WARP_FN void keep_order() { asm volatile("" ::: "memory"); }

// c += a b; a [16, 16] row major, b [16, 8] column major, bf16. Fragments as in the PTX manual.
WARP_FN void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                      uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// As mma_bf16 with a [16, 8] and b [8, 8].
WARP_FN void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// As mma_bf16, fp16 operands.
WARP_FN void mma_fp16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                      uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a b; a [16, 8], b [8, 8], operands cut to tf32.
WARP_FN void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
        "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// An 8 x 8 table of 16-bit numbers, row lane / 4 and two columns a lane, transposed.
WARP_FN uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Two numbers in one register, the first in the low half.
WARP_FN uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

WARP_FN uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

WARP_FN float fp16_low(uint32_t packed) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(packed & 0xffffu)));
}

WARP_FN float fp16_high(uint32_t packed) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(packed >> 16)));
}

WARP_FN float as_float(uint32_t x) { return __uint_as_float(x); }

WARP_FN uint32_t as_bits(float x) { return __float_as_uint(x); }

WARP_FN float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }

WARP_FN float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// The low halves of two registers, and the high halves.
WARP_FN uint32_t lows(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); }

WARP_FN uint32_t highs(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }

// Largest finite fp16 number: an update beyond it stays finite, as in the Triton kernel.
WARP_FN float clamp_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

WARP_FN float tf32_head(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

WARP_FN float inverse_root(float x) { return __frsqrt_rn(x); }

// A state is read once: keep it out of L1, and let L2 fetch whole lines.
WARP_FN uint4 load_stream(const void* at) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}

// Asked for here, and not where the compiler first needs it: behind a branch, say.
WARP_FN int load_now(const int* at) {
  int x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}

WARP_FN uint4 load16(const void* at) { return *static_cast<const uint4*>(at); }

WARP_FN uint32_t load4(const void* at) { return *static_cast<const uint32_t*>(at); }

WARP_FN uint2 load8(const void* at) { return *static_cast<const uint2*>(at); }

WARP_FN void store16(void* at, uint4 x) { *static_cast<uint4*>(at) = x; }

WARP_FN void store4(void* at, uint32_t x) { *static_cast<uint32_t*>(at) = x; }

WARP_FN void store8(void* at, uint2 x) { *static_cast<uint2*>(at) = x; }

WARP_FN uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// 16 bytes into shared memory, past the registers and L1, for this lane alone.
WARP_FN void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}

// The lane's copies since the last call are one group.
WARP_FN void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All groups of the lane but the last kLater have arrived.
template <int kLater>
WARP_FN void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Barriers in shared memory that a phase of `arrivals`, and of the copies that it was told to expect,
// ends. One thread makes them, then `barriers_made`, then a barrier of the block.
WARP_FN void make_barrier(uint64_t* at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals)
               : "memory");
}

WARP_FN void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

WARP_FN void arrive(uint64_t* at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}

// By all lanes of a warp.
WARP_FN void wait(uint64_t* at, int parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(at)), "r"(parity)
        : "memory");
  sync();
}

// One thread's arrival, which also says how many bytes of copies the phase waits for.
WARP_FN void arrive_expecting(uint64_t* at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(at)),
               "r"(bytes)
               : "memory");
}

// A bulk copy whose bytes count for the barrier.
WARP_FN void copy_for(void* to, const void* from, uint32_t bytes, uint64_t* at) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(at))
      : "memory");
}

// Of each lane, once the copies that it asked for by copy16 have arrived.
WARP_FN void arrive_after_copies(uint64_t* at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(at))
               : "memory");
}

}  // namespace warp

#endif
