// What the host hands to the kernels; no AscendC type in it, so that the binding compiles without.
#pragma once

#include "kernel_tiling/kernel_tiling.h"

#include "gdn_verify_tiling.h"

namespace gdn_verify {

// Device addresses. cubeQ, cubeK: q and k in the states' type.
struct Tensors {
    void *q, *k, *v, *logDecay, *beta, *state, *queryStartLoc, *stateIndices, *accepted, *cubeQ, *cubeK;
    void *workspace, *out;
};

void Launch(void *stream, const Tensors &tensors, const Tiling &tiling, const TCubeTiling &cube, bool floatState);

}  // namespace gdn_verify
