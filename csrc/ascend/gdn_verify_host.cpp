// Not run on an NPU.
#include "gdn_verify_host.h"

#include "tiling/platform/platform_ascendc.h"
#include "tiling/tiling_api.h"

namespace gdn_verify {

using matmul_tiling::CubeFormat;
using matmul_tiling::DataType;
using matmul_tiling::TPosition;

Device CurrentDevice() {
    auto *platform = platform_ascendc::PlatformAscendCManager::GetInstance();
    uint64_t vectorMemory = 0;
    platform->GetCoreMemSize(platform_ascendc::CoreMemType::UB, vectorMemory);
    return {platform->GetCoreNumAic(), platform->GetCoreNumAiv(), static_cast<uint32_t>(vectorMemory)};
}

bool MakeCubeTiling(const Tiling &tiling, bool floatState, TCubeTiling *cube) {
    auto *platform = platform_ascendc::PlatformAscendCManager::GetInstance();
    matmul_tiling::MatmulApiTiling api(*platform);
    const DataType type = floatState ? DataType::DT_FLOAT : DataType::DT_BF16;
    api.SetAType(TPosition::GM, CubeFormat::ND, type, false);
    api.SetBType(TPosition::GM, CubeFormat::ND, type, true);
    api.SetCType(TPosition::GM, CubeFormat::ND, DataType::DT_FLOAT);
    api.SetBias(false);
    // The larger of the two products; the kernel narrows single calls.
    const int32_t columns = Larger(tiling.valueSize, kMaxRows);
    api.SetOrgShape(kMaxRows, columns, tiling.keyHeads * tiling.keySize, tiling.keySize);
    api.SetShape(kMaxRows, columns, tiling.keySize);
    api.SetBufferSpace(-1, -1, -1);
    optiling::TCubeTiling found;
    if (api.GetTiling(found) != 0) return false;
    static_assert(sizeof(TCubeTiling) > 0, "kernel_tiling.h must be CANN's");
    found.SaveToBuffer(cube, found.GetDataSize());
    return true;
}

}  // namespace gdn_verify
