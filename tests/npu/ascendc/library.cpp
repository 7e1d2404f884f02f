// What CANN would build beside binding.cpp, on the double: the kernels run core by core on device
// memory that is host memory, and the chip is an Ascend 910B's by its core counts.
#define GDN_VERIFY_HOST_DOUBLE
#include "gdn_verify.cpp"
#include "gdn_verify_host.h"

namespace gdn_verify {

namespace {

constexpr uint32_t kMemory = 192 * 1024;

template <typename Kernel>
void OnEveryCore(uint32_t cores, Kernel kernel) {
    // The binding checked the tensors' sizes; addresses are checked where they are known (runner.cpp).
    std::map<uintptr_t, uint64_t> everywhere{{0, UINT64_MAX}};
    for (uint32_t index = 0; index < cores; ++index) {
        ascendc_double::Core core;
        core.index = index, core.count = cores, core.memory = kMemory, core.ranges = &everywhere;
        core.bytes.resize(kMemory), core.defined.resize(kMemory);
        core.blocks.resize(kMemory / ascendc_double::kBlock);
        ascendc_double::Current() = &core;
        kernel();
    }
}

template <typename StateT>
void Run(const Tensors &t, const Tiling &cut) {
    const auto at = [](void *address) { return static_cast<GM_ADDR>(address); };
    OnEveryCore(cut.cubeCores, [&] {
        RunCube<StateT>(at(t.cubeQ), at(t.cubeK), at(t.state), at(t.queryStartLoc), at(t.stateIndices),
                        at(t.accepted), at(t.workspace), at(t.tiling));
    });
    OnEveryCore(cut.vectorCores, [&] {
        RunVector<StateT>(at(t.q), at(t.k), at(t.v), at(t.logDecay), at(t.beta), at(t.state), at(t.queryStartLoc),
                          at(t.stateIndices), at(t.accepted), at(t.workspace), at(t.tiling), at(t.out));
    });
}

}  // namespace

void Launch(void *, const Tensors &tensors, const Tiling &cut, bool floatState) {
    floatState ? Run<float>(tensors, cut) : Run<bfloat16_t>(tensors, cut);
}

Device CurrentDevice() { return {20, 40, kMemory}; }

bool MakeCubeTiling(const Tiling &, bool, TCubeTiling *) { return true; }

}  // namespace gdn_verify
