// Double of CANN's header: the cube's tiling is opaque to the kernels.
#pragma once
#include <cstdint>
struct TCubeTiling {
    int32_t opaque[64];
};
