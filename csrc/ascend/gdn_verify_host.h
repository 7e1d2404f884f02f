// Host side of gdn_verify: the cube's own tiling, from CANN's library.
#pragma once

#include "kernel_tiling/kernel_tiling.h"

#include "gdn_verify_tiling.h"

namespace gdn_verify {

Device CurrentDevice();

// False where CANN finds no tiling for these products.
bool MakeCubeTiling(const Tiling &tiling, bool floatState, TCubeTiling *cube);

}  // namespace gdn_verify
