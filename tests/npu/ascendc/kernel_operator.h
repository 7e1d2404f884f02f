// A small double of AscendC for a CPU: the calls that csrc/ascend makes, each checked.
//
// Checked: addresses in global memory against the ranges that the runner registered; on-chip
// memory against its size; 32-byte alignment of copies; reads of on-chip memory that nothing has
// written; and order between pipes. A pipe may touch what another one wrote or reads only after
// SetFlag/WaitFlag between the two, and the vector pipe what it wrote itself only after a barrier:
// each pipe carries a vector clock, each 32-byte block the times of its last writer and readers.
//
// Not modelled: time, bank conflicts, instruction limits, caches of the scalar unit.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __aicore__
#define __global__
#define __gm__
#define KERNEL_TASK_TYPE_DEFAULT(TYPE)
using GM_ADDR = uint8_t *;

struct bfloat16_t {
    uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(bfloat16_t x) {
    const uint32_t wide = uint32_t{x.bits} << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}
inline void FromFloat(float x, float *to) { *to = x; }
inline void FromFloat(float x, bfloat16_t *to) {  // to nearest, halves to even
    uint32_t wide;
    std::memcpy(&wide, &x, sizeof wide);
    *to = std::isnan(x) ? bfloat16_t{0x7FC0}
                        : bfloat16_t{static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)};
}

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPES };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace ascendc_double {

inline void Require(bool holds, const std::string &message) {
    if (!holds) throw std::runtime_error(message);
}

constexpr uint32_t kBlock = 32;
using Clock = std::array<uint64_t, PIPES>;

struct Block {
    int writer = -1;
    uint64_t written = 0;
    Clock read{};
};

// One core: its on-chip memory, its pipes' clocks, and where it is in the launch.
struct Core {
    uint32_t index = 0, count = 1, memory = 0, used = 0;
    std::vector<uint8_t> bytes;
    std::vector<bool> defined;
    std::vector<Block> blocks;
    uint64_t now = 0;
    std::array<Clock, PIPES> seen{};
    std::map<std::pair<int, int>, Clock> flags;  // (event kind, id) -> the setter's clock
    std::map<int, uint32_t> reserved;            // event kind -> ids taken
    std::map<uintptr_t, uint64_t> *ranges = nullptr;

    void Touch(pipe_t pipe, uint64_t offset, uint64_t size, bool writes) {
        Require(offset + size <= bytes.size(), "access past the on-chip buffer");
        ++now;
        if (pipe != PIPE_V) seen[pipe][pipe] = now;
        for (uint64_t b = offset / kBlock; b <= (offset + size - 1) / kBlock; ++b) {
            Block &block = blocks[b];
            if (block.writer >= 0)
                Require(seen[pipe][block.writer] >= block.written, Race(pipe, block.writer, "wrote", b));
            if (writes) {
                for (int other = 0; other < PIPES; ++other)
                    if (other != pipe) Require(seen[pipe][other] >= block.read[other], Race(pipe, other, "reads", b));
                block.writer = pipe, block.written = now;
            } else {
                block.read[pipe] = now;
            }
        }
    }

    static std::string Race(int pipe, int other, const char *what, uint64_t block) {
        static const char *names[] = {"S", "V", "MTE2", "MTE3"};
        return std::string("race: ") + names[pipe] + " touches block " + std::to_string(block) + ", which " +
               names[other] + " " + what + ", without a wait";
    }

    void Merge(pipe_t pipe, const Clock &other) {
        for (int i = 0; i < PIPES; ++i) seen[pipe][i] = std::max(seen[pipe][i], other[i]);
    }
};

inline Core *&Current() {
    static thread_local Core *core = nullptr;
    return core;
}

inline void CheckGlobal(const void *address, uint64_t size) {
    const auto &ranges = *Current()->ranges;
    auto after = ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
    Require(after != ranges.begin(), "global address before every tensor");
    const auto &[start, length] = *std::prev(after);
    Require(reinterpret_cast<uintptr_t>(address) + size <= start + length, "global access past its tensor");
}

}  // namespace ascendc_double

namespace AscendC {

using ascendc_double::Current;
using ascendc_double::Require;

enum class TPosition { GM, VECCALC };
enum class RoundMode { CAST_NONE, CAST_RINT };
// High half: the pipe that sets; low half: the pipe that waits.
enum class HardEvent {
    V_S = PIPE_V * 16 + PIPE_S, V_MTE2 = PIPE_V * 16 + PIPE_MTE2, V_MTE3 = PIPE_V * 16 + PIPE_MTE3,
    MTE2_V = PIPE_MTE2 * 16 + PIPE_V, MTE2_S = PIPE_MTE2 * 16 + PIPE_S,
    MTE3_V = PIPE_MTE3 * 16 + PIPE_V, MTE3_MTE2 = PIPE_MTE3 * 16 + PIPE_MTE2,
    S_MTE2 = PIPE_S * 16 + PIPE_MTE2, S_V = PIPE_S * 16 + PIPE_V,
};

inline uint32_t GetBlockIdx() { return Current()->index; }
inline uint32_t GetBlockNum() { return Current()->count; }

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(T *address) { at_ = address; }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor moved;
        moved.at_ = at_ + offset;
        return moved;
    }
    T GetValue(uint64_t index) const { return Read(index); }
    T Read(uint64_t index) const {
        ascendc_double::CheckGlobal(at_ + index, sizeof(T));
        return at_[index];
    }
    void Write(uint64_t index, T value) {
        ascendc_double::CheckGlobal(at_ + index, sizeof(T));
        at_[index] = value;
    }
    T *at_ = nullptr;
};

template <typename T>
class LocalTensor {
public:
    LocalTensor() = default;
    LocalTensor(uint64_t start, uint64_t bytes) : start_(start), end_(start + bytes) {}
    LocalTensor operator[](uint64_t offset) const {
        LocalTensor moved(*this);
        moved.start_ += offset * sizeof(T);
        Require(moved.start_ <= end_, "offset past the on-chip tensor");
        return moved;
    }
    T GetValue(uint64_t index) const { return *Reads(PIPE_S, index, 1); }

    const T *Reads(pipe_t pipe, uint64_t index, uint64_t count) const {
        const uint64_t offset = Place(index, count);
        Current()->Touch(pipe, offset, count * sizeof(T), false);
        for (uint64_t i = 0; i < count * sizeof(T); ++i)
            Require(Current()->defined[offset + i], "on-chip memory is read before anything wrote it");
        return reinterpret_cast<const T *>(&Current()->bytes[offset]);
    }
    T *Writes(pipe_t pipe, uint64_t index, uint64_t count) const {
        const uint64_t offset = Place(index, count);
        Current()->Touch(pipe, offset, count * sizeof(T), true);
        std::fill_n(Current()->defined.begin() + offset, count * sizeof(T), true);
        return reinterpret_cast<T *>(&Current()->bytes[offset]);
    }
    uint64_t start_ = 0, end_ = 0;

private:
    uint64_t Place(uint64_t index, uint64_t count) const {
        const uint64_t offset = start_ + index * sizeof(T);
        Require(count > 0 && offset + count * sizeof(T) <= end_, "access past the on-chip tensor");
        return offset;
    }
};

template <TPosition>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get() const {
        return LocalTensor<T>(start_, size_);
    }
    uint64_t start_ = 0, size_ = 0;
};

class TPipe {
public:
    template <typename Buffer>
    void InitBuffer(Buffer &buffer, uint32_t bytes) {
        auto *core = Current();
        Require(bytes % ascendc_double::kBlock == 0 && bytes > 0, "a buffer is a multiple of 32 bytes");
        Require(core->used + bytes <= core->memory, "on-chip memory is full");
        buffer.start_ = core->used, buffer.size_ = bytes;
        core->used += bytes;
    }
    template <HardEvent Event>
    int8_t AllocEventID() {
        const uint32_t id = Current()->reserved[static_cast<int>(Event)]++;
        Require(id < 7, "event ids have run out");
        return static_cast<int8_t>(id);
    }
    template <HardEvent Event>
    void ReleaseEventID(event_t) {
        --Current()->reserved[static_cast<int>(Event)];
    }
    int8_t FetchEventID(HardEvent event) { return static_cast<int8_t>(Current()->reserved[static_cast<int>(event)]); }
};

template <HardEvent Event>
void SetFlag(event_t id) {
    auto *core = Current();
    const auto key = std::make_pair(static_cast<int>(Event), static_cast<int>(id));
    Require(!core->flags.count(key), "a flag is set twice without a wait between");
    const auto setter = static_cast<pipe_t>(static_cast<int>(Event) / 16);
    ascendc_double::Clock clock = core->seen[setter];
    clock[setter] = core->now;  // the flag is set once the pipe's earlier instructions are done
    core->flags[key] = clock;
}

template <HardEvent Event>
void WaitFlag(event_t id) {
    auto *core = Current();
    const auto found = core->flags.find({static_cast<int>(Event), static_cast<int>(id)});
    Require(found != core->flags.end(), "a wait for a flag that nobody sets");
    core->Merge(static_cast<pipe_t>(static_cast<int>(Event) % 16), found->second);
    core->flags.erase(found);
}

template <pipe_t Pipe>
void PipeBarrier() {
    Current()->seen[Pipe][Pipe] = Current()->now;
}

struct DataCopyExtParams {
    uint16_t blockCount;
    uint32_t blockLen, srcStride, dstStride, rsv;
};
template <typename T>
struct DataCopyPadExtParams {
    bool isPad;
    uint8_t leftPadding, rightPadding;
    T paddingValue;
};

inline uint64_t Rounded(uint64_t bytes) {
    return (bytes + ascendc_double::kBlock - 1) / ascendc_double::kBlock * ascendc_double::kBlock;
}

template <typename T>
void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &shape,
                 const DataCopyPadExtParams<T> &) {
    Require(to.start_ % ascendc_double::kBlock == 0, "a copy's on-chip side must start at 32 bytes");
    Require(shape.blockCount > 0 && shape.blockLen > 0 && shape.dstStride == 0, "a copy of nothing");
    const uint64_t step = Rounded(shape.blockLen) / sizeof(T), size = shape.blockLen / sizeof(T);
    for (uint64_t i = 0; i < shape.blockCount; ++i) {
        const auto *source = reinterpret_cast<const uint8_t *>(from.at_) + i * (shape.blockLen + uint64_t{shape.srcStride});
        ascendc_double::CheckGlobal(source, shape.blockLen);
        T *target = to.Writes(PIPE_MTE2, i * step, step);  // the rest of the block becomes rubbish
        std::memset(target, 0x7F, step * sizeof(T));
        std::memcpy(target, source, size * sizeof(T));
    }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &shape) {
    Require(from.start_ % ascendc_double::kBlock == 0, "a copy's on-chip side must start at 32 bytes");
    Require(shape.blockCount > 0 && shape.blockLen > 0 && shape.srcStride == 0, "a copy of nothing");
    const uint64_t step = Rounded(shape.blockLen) / sizeof(T), size = shape.blockLen / sizeof(T);
    for (uint64_t i = 0; i < shape.blockCount; ++i) {
        auto *target = reinterpret_cast<uint8_t *>(to.at_) + i * (shape.blockLen + uint64_t{shape.dstStride});
        ascendc_double::CheckGlobal(target, shape.blockLen);
        std::memcpy(target, from.Reads(PIPE_MTE3, i * step, size), size * sizeof(T));
    }
}

template <typename To, typename From, typename Function>
void Unary(const LocalTensor<To> &to, const LocalTensor<From> &from, uint64_t count, Function function) {
    Require(to.start_ % ascendc_double::kBlock == 0 && from.start_ % ascendc_double::kBlock == 0,
            "vector operands start at 32 bytes");
    const From *source = from.Reads(PIPE_V, 0, count);
    std::vector<From> values(source, source + count);
    To *target = to.Writes(PIPE_V, 0, count);
    for (uint64_t i = 0; i < count; ++i) FromFloat(function(ToFloat(values[i])), &target[i]);
}

template <typename Function>
void Binary(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &b, uint64_t count,
            Function function) {
    Require((to.start_ | a.start_ | b.start_) % ascendc_double::kBlock == 0, "vector operands start at 32 bytes");
    const float *left = a.Reads(PIPE_V, 0, count), *right = b.Reads(PIPE_V, 0, count);
    std::vector<float> values(count);
    for (uint64_t i = 0; i < count; ++i) values[i] = function(left[i], right[i]);
    std::copy(values.begin(), values.end(), to.Writes(PIPE_V, 0, count));
}

template <typename To, typename From>
void Cast(const LocalTensor<To> &to, const LocalTensor<From> &from, RoundMode mode, uint64_t count) {
    Require((mode == RoundMode::CAST_NONE) == (sizeof(To) > sizeof(From)), "a narrowing cast rounds, a widening does not");
    Unary(to, from, count, [](float x) { return x; });
}
inline void Muls(const LocalTensor<float> &to, const LocalTensor<float> &a, float factor, uint64_t count) {
    Unary(to, a, count, [=](float x) { return x * factor; });
}
inline void Adds(const LocalTensor<float> &to, const LocalTensor<float> &a, float term, uint64_t count) {
    Unary(to, a, count, [=](float x) { return x + term; });
}
inline void Exp(const LocalTensor<float> &to, const LocalTensor<float> &a, uint64_t count) {
    Unary(to, a, count, [](float x) { return std::exp(x); });
}
inline void Sqrt(const LocalTensor<float> &to, const LocalTensor<float> &a, uint64_t count) {
    Unary(to, a, count, [](float x) { return std::sqrt(x); });
}
inline void Mul(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &b, uint64_t count) {
    Binary(to, a, b, count, [](float x, float y) { return x * y; });
}
inline void Add(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &b, uint64_t count) {
    Binary(to, a, b, count, [](float x, float y) { return x + y; });
}
inline void Div(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &b, uint64_t count) {
    Binary(to, a, b, count, [](float x, float y) { return x / y; });
}
inline void Axpy(const LocalTensor<float> &to, const LocalTensor<float> &a, float factor, uint64_t count) {
    Binary(to, to, a, count, [=](float x, float y) { return x + factor * y; });
}
inline void Duplicate(const LocalTensor<float> &to, float value, uint64_t count) {
    std::fill_n(to.Writes(PIPE_V, 0, count), count, value);
}
inline void ReduceSum(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &scratch,
                      uint64_t count) {
    Require(scratch.start_ >= a.start_ + count * sizeof(float) || scratch.start_ + count * sizeof(float) <= a.start_,
            "ReduceSum's scratch lies over its source");
    const float *source = a.Reads(PIPE_V, 0, count);
    double sum = 0;
    for (uint64_t i = 0; i < count; ++i) sum += source[i];
    std::fill_n(scratch.Writes(PIPE_V, 0, count), count, 1e30f);
    *to.Writes(PIPE_V, 0, 1) = static_cast<float>(sum);
}

}  // namespace AscendC

inline AscendC::TPipe *GetTPipePtr() {
    static AscendC::TPipe pipe;  // its state is the core's
    return &pipe;
}
