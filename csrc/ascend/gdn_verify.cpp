// Entry points of gdn_verify: a cube kernel, then a vector kernel on the same stream.
//
// Not run on an NPU.
#include "gdn_verify_vector.h"

namespace gdn_verify {

template <typename StateT>
__aicore__ inline void RunCube(GM_ADDR q, GM_ADDR k, GM_ADDR state, GM_ADDR queryStartLoc, GM_ADDR stateIndices,
                               GM_ADDR accepted, GM_ADDR workspace, Tiling tiling, TCubeTiling cubeTiling) {
    AscendC::TPipe pipe;
    CubeHalf<StateT> half(&pipe);
    half.Init(q, k, state, queryStartLoc, stateIndices, accepted, workspace, tiling, &cubeTiling);
    half.Process();
}

template <typename StateT>
__aicore__ inline void RunVector(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR logDecay, GM_ADDR beta, GM_ADDR state,
                                 GM_ADDR queryStartLoc, GM_ADDR stateIndices, GM_ADDR accepted,
                                 GM_ADDR workspace, GM_ADDR out, Tiling tiling) {
    AscendC::TPipe pipe;
    VectorHalf<StateT> half(&pipe);
    half.Init(q, k, v, logDecay, beta, state, queryStartLoc, stateIndices, accepted, workspace, out, tiling);
    half.Process();
}

}  // namespace gdn_verify

#define GDN_VERIFY_KERNELS(NAME, STATE)                                                                           \
    extern "C" __global__ __aicore__ void gdn_verify_cube_##NAME(                                                 \
        GM_ADDR q, GM_ADDR k, GM_ADDR state, GM_ADDR queryStartLoc, GM_ADDR stateIndices, GM_ADDR accepted,       \
        GM_ADDR workspace, gdn_verify::Tiling tiling, TCubeTiling cubeTiling) {                                   \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                                                           \
        gdn_verify::RunCube<STATE>(q, k, state, queryStartLoc, stateIndices, accepted, workspace, tiling,         \
                                   cubeTiling);                                                                   \
    }                                                                                                             \
    extern "C" __global__ __aicore__ void gdn_verify_vector_##NAME(                                               \
        GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR logDecay, GM_ADDR beta, GM_ADDR state, GM_ADDR queryStartLoc,    \
        GM_ADDR stateIndices, GM_ADDR accepted, GM_ADDR workspace, GM_ADDR out, gdn_verify::Tiling tiling) {      \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                           \
        gdn_verify::RunVector<STATE>(q, k, v, logDecay, beta, state, queryStartLoc, stateIndices, accepted,       \
                                     workspace, out, tiling);                                                     \
    }

GDN_VERIFY_KERNELS(float32, float)
GDN_VERIFY_KERNELS(bfloat16, bfloat16_t)

#ifndef GDN_VERIFY_HOST_DOUBLE
#include "gdn_verify_launch.h"

namespace gdn_verify {

void Launch(void *stream, const Tensors &t, const Tiling &tiling, const TCubeTiling &cube, bool floatState) {
    const auto vector = floatState ? gdn_verify_vector_float32 : gdn_verify_vector_bfloat16;
    const auto product = floatState ? gdn_verify_cube_float32 : gdn_verify_cube_bfloat16;
    product<<<tiling.cubeCores, nullptr, stream>>>(
        (GM_ADDR)t.cubeQ, (GM_ADDR)t.cubeK, (GM_ADDR)t.state, (GM_ADDR)t.queryStartLoc,
        (GM_ADDR)t.stateIndices, (GM_ADDR)t.accepted, (GM_ADDR)t.workspace, tiling, cube);
    vector<<<tiling.vectorCores, nullptr, stream>>>(
        (GM_ADDR)t.q, (GM_ADDR)t.k, (GM_ADDR)t.v, (GM_ADDR)t.logDecay, (GM_ADDR)t.beta, (GM_ADDR)t.state,
        (GM_ADDR)t.queryStartLoc, (GM_ADDR)t.stateIndices, (GM_ADDR)t.accepted, (GM_ADDR)t.workspace,
        (GM_ADDR)t.out, tiling);
}

}  // namespace gdn_verify
#endif
