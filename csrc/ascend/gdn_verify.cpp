// Entry points of gdn_verify: a cube kernel, then a vector kernel on the same stream.
//
// Not run on an NPU.
#include "gdn_verify_vector.h"

#include "gdn_verify_launch.h"

namespace gdn_verify {

__aicore__ inline LaunchTiling ReadTiling(GM_ADDR from) {
    LaunchTiling tiling;
    auto *words = reinterpret_cast<uint32_t *>(&tiling);
    for (uint32_t i = 0; i < sizeof(LaunchTiling) / sizeof(uint32_t); ++i) words[i] = ((__gm__ uint32_t *)from)[i];
    return tiling;
}

template <typename StateT>
__aicore__ inline void RunCube(GM_ADDR q, GM_ADDR k, GM_ADDR state, GM_ADDR queryStartLoc, GM_ADDR stateIndices,
                               GM_ADDR accepted, GM_ADDR workspace, GM_ADDR tilingAt) {
    const LaunchTiling tiling = ReadTiling(tilingAt);
    AscendC::TPipe pipe;
    CubeHalf<StateT> half(&pipe);
    half.Init(q, k, state, queryStartLoc, stateIndices, accepted, workspace, tiling.cut, &tiling.cube);
    half.Process();
}

template <typename StateT>
__aicore__ inline void RunVector(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR logDecay, GM_ADDR beta, GM_ADDR state,
                                 GM_ADDR queryStartLoc, GM_ADDR stateIndices, GM_ADDR accepted,
                                 GM_ADDR workspace, GM_ADDR tilingAt, GM_ADDR out) {
    const LaunchTiling tiling = ReadTiling(tilingAt);
    AscendC::TPipe pipe;
    VectorHalf<StateT> half(&pipe);
    half.Init(q, k, v, logDecay, beta, state, queryStartLoc, stateIndices, accepted, workspace, out, tiling.cut);
    half.Process();
}

}  // namespace gdn_verify

#define GDN_VERIFY_KERNELS(NAME, STATE)                                                                           \
    extern "C" __global__ __aicore__ void gdn_verify_cube_##NAME(                                                 \
        GM_ADDR q, GM_ADDR k, GM_ADDR state, GM_ADDR queryStartLoc, GM_ADDR stateIndices, GM_ADDR accepted,       \
        GM_ADDR workspace, GM_ADDR tiling) {                                                                      \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                                                           \
        gdn_verify::RunCube<STATE>(q, k, state, queryStartLoc, stateIndices, accepted, workspace, tiling);        \
    }                                                                                                             \
    extern "C" __global__ __aicore__ void gdn_verify_vector_##NAME(                                               \
        GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR logDecay, GM_ADDR beta, GM_ADDR state, GM_ADDR queryStartLoc,    \
        GM_ADDR stateIndices, GM_ADDR accepted, GM_ADDR workspace, GM_ADDR tiling, GM_ADDR out) {                 \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                           \
        gdn_verify::RunVector<STATE>(q, k, v, logDecay, beta, state, queryStartLoc, stateIndices, accepted,       \
                                     workspace, tiling, out);                                                     \
    }

GDN_VERIFY_KERNELS(float32, float)
GDN_VERIFY_KERNELS(bfloat16, bfloat16_t)

#ifndef GDN_VERIFY_HOST_DOUBLE

namespace gdn_verify {

void Launch(void *stream, const Tensors &t, const Tiling &cut, bool floatState) {
    const auto at = [](void *address) { return static_cast<GM_ADDR>(address); };
#define GDN_VERIFY_LAUNCH(NAME)                                                                                   \
    gdn_verify_cube_##NAME<<<cut.cubeCores, nullptr, stream>>>(                                                   \
        at(t.cubeQ), at(t.cubeK), at(t.state), at(t.queryStartLoc), at(t.stateIndices), at(t.accepted),           \
        at(t.workspace), at(t.tiling));                                                                           \
    gdn_verify_vector_##NAME<<<cut.vectorCores, nullptr, stream>>>(                                               \
        at(t.q), at(t.k), at(t.v), at(t.logDecay), at(t.beta), at(t.state), at(t.queryStartLoc),                  \
        at(t.stateIndices), at(t.accepted), at(t.workspace), at(t.tiling), at(t.out))
    if (floatState) {
        GDN_VERIFY_LAUNCH(float32);
    } else {
        GDN_VERIFY_LAUNCH(bfloat16);
    }
#undef GDN_VERIFY_LAUNCH
}

}  // namespace gdn_verify
#endif
