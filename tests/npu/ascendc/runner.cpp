// Runs csrc/ascend's kernels on the double, core by core, and exports them and the tiling to ctypes.
#define GDN_VERIFY_HOST_DOUBLE
#include "gdn_verify.cpp"

#include <cstdio>

namespace {

struct Buffer {
    void *at;
    uint64_t bytes;
};

// The order of Buffers below.
enum { Q, K, V, LOG_DECAY, BETA, STATE, START, INDICES, ACCEPTED, CUBE_Q, CUBE_K, WORKSPACE, OUT, COUNT };

template <typename Kernel>
void OnEveryCore(uint32_t cores, uint32_t memory, std::map<uintptr_t, uint64_t> *ranges, Kernel kernel) {
    for (uint32_t index = 0; index < cores; ++index) {
        ascendc_double::Core core;
        core.index = index, core.count = cores, core.memory = memory, core.ranges = ranges;
        core.bytes.resize(memory), core.defined.resize(memory);
        core.blocks.resize(memory / ascendc_double::kBlock);
        ascendc_double::Current() = &core;
        kernel();
        ascendc_double::Require(core.flags.empty(), "a flag is left that nobody waited for");
        for (const auto &[event, taken] : core.reserved)
            ascendc_double::Require(taken == 0, "an event id is not released");
    }
}

template <typename StateT>
void Run(const Buffer *b, const gdn_verify::Tiling &t, uint32_t memory) {
    std::map<uintptr_t, uint64_t> ranges;
    for (int i = 0; i < COUNT; ++i) ranges[reinterpret_cast<uintptr_t>(b[i].at)] = b[i].bytes;
    const auto at = [&](int i) { return static_cast<GM_ADDR>(b[i].at); };
    gdn_verify::LaunchTiling launch{t, TCubeTiling{}};
    const auto tiling = reinterpret_cast<GM_ADDR>(&launch);
    OnEveryCore(t.cubeCores, memory, &ranges, [&] {
        gdn_verify::RunCube<StateT>(at(CUBE_Q), at(CUBE_K), at(STATE), at(START), at(INDICES), at(ACCEPTED),
                                    at(WORKSPACE), tiling);
    });
    OnEveryCore(t.vectorCores, memory, &ranges, [&] {
        gdn_verify::RunVector<StateT>(at(Q), at(K), at(V), at(LOG_DECAY), at(BETA), at(STATE), at(START),
                                      at(INDICES), at(ACCEPTED), at(WORKSPACE), tiling, at(OUT));
    });
}

}  // namespace

extern "C" {

// Null, or what is wrong with the shape.
const char *make_tiling(const gdn_verify::Shape *shape, const gdn_verify::Device *device, float scale,
                        gdn_verify::Tiling *tiling) {
    return gdn_verify::MakeTiling(*shape, *device, scale, tiling);
}

uint32_t vector_bytes(const gdn_verify::Tiling *t, uint32_t stateBytes) {
    return gdn_verify::BuffersOf(t->keySize, t->valueSize, t->valueTile, stateBytes).total();
}

// 0, or 1 with the double's complaint in `message`.
int run(const Buffer *buffers, const gdn_verify::Tiling *tiling, int floatState, uint32_t memory, char *message,
        uint64_t room) {
    try {
        floatState ? Run<float>(buffers, *tiling, memory) : Run<bfloat16_t>(buffers, *tiling, memory);
        return 0;
    } catch (const std::exception &error) {
        std::snprintf(message, room, "%s", error.what());
        return 1;
    }
}
}
