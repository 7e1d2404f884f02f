// What the host hands to the kernels; no AscendC type in it, so that the binding compiles without.
#pragma once

#include "kernel_tiling/kernel_tiling.h"

#include "gdn_verify_tiling.h"

namespace gdn_verify {

// Lies in device memory, for a launch takes addresses and single numbers only.
struct LaunchTiling {
    Tiling cut;
    TCubeTiling cube;
};
static_assert(sizeof(LaunchTiling) % sizeof(uint32_t) == 0, "the kernels copy it word by word");

// Device addresses. cubeQ, cubeK: q and k in the states' type. tiling: a LaunchTiling.
struct Tensors {
    void *q, *k, *v, *logDecay, *beta, *state, *queryStartLoc, *stateIndices, *accepted, *cubeQ, *cubeK;
    void *workspace, *tiling, *out;
};

void Launch(void *stream, const Tensors &tensors, const Tiling &cut, bool floatState);

}  // namespace gdn_verify
