// How gdn_verify is cut for an NPU: pure arithmetic, shared by host, kernels and host tests.
//
// Not run on an NPU. Sizes are elements unless a name says bytes.
#pragma once

#include <cstdint>

namespace gdn_verify {

constexpr uint32_t kMaxRows = 16;          // rows of one request: K + 1; also the side of a Gram block
constexpr uint32_t kBlockBytes = 32;       // unit of on-chip memory and of its copies
constexpr uint32_t kBlockFloats = kBlockBytes / sizeof(float);
constexpr uint32_t kMaxHeadSize = 256;
constexpr uint32_t kGramFloats = 2 * kMaxRows * kMaxRows;  // k k^T, then q k^T
constexpr uint32_t kReservedBytes = 8 * 1024;  // what the framework keeps of a core's memory
constexpr uint32_t kStages = 2;                // state tiles on their way out

struct Shape {
    uint32_t requests, keyHeads, valueHeads, keySize, valueSize, columns;
    uint32_t stateBytes;  // of one number: 2 (bfloat16) or 4 (float)
};

struct Device {
    uint32_t cubeCores, vectorCores, vectorMemoryBytes;
};

struct Tiling {
    uint32_t requests, keyHeads, valueHeads, keySize, valueSize, columns;
    uint32_t valueTile;               // rows of a state that are on chip at once
    uint32_t cubeCores, vectorCores;  // cores that get work
    uint64_t projectionFloats;        // of one (request, value head): Y_k, then Y_q
    uint64_t gramOffset;              // floats before the Gram blocks of (request, key head)
    uint64_t workspaceBytes;
    float scale;
};

// On-chip bytes of the vector kernel's buffers; its Init asks for exactly these.
struct VectorBuffers {
    uint32_t input, rows, query, value, projection, update, output, gates, gram, norms, scratch, state,
        stage;

    uint32_t total() const {
        return input + rows + query + value + projection + update + output + gates + gram + norms + scratch +
               state + kStages * stage;
    }
};

constexpr uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint32_t AlignBytes(uint64_t bytes) {
    return static_cast<uint32_t>(CeilDiv(bytes, kBlockBytes) * kBlockBytes);
}
constexpr uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
constexpr uint32_t Smaller(uint64_t a, uint32_t b) { return a < b ? static_cast<uint32_t>(a) : b; }

inline VectorBuffers BuffersOf(uint32_t keySize, uint32_t valueSize, uint32_t valueTile, uint32_t stateBytes) {
    VectorBuffers b{};
    b.input = AlignBytes(uint64_t{kMaxRows} * Larger(keySize, valueSize) * 2);  // bfloat16 rows
    b.rows = AlignBytes(uint64_t{kMaxRows} * keySize * sizeof(float));          // normalised keys
    b.query = b.rows;
    b.value = AlignBytes(uint64_t{kMaxRows} * valueSize * sizeof(float));
    b.projection = 2 * b.value;
    b.update = b.value;
    b.output = AlignBytes(uint64_t{kMaxRows} * valueSize * 2);
    b.gates = 2 * kMaxRows * kBlockBytes;  // one number a block: rows lie strided in memory
    b.gram = AlignBytes(kGramFloats * sizeof(float));
    b.norms = 2 * kMaxRows * kBlockBytes;
    b.scratch = 2 * AlignBytes(uint64_t{keySize} * sizeof(float)) + kBlockBytes;  // squares, and their sum
    b.state = AlignBytes(uint64_t{valueTile} * keySize * sizeof(float));
    b.stage = AlignBytes(uint64_t{valueTile} * keySize * stateBytes);
    return b;
}

// Null where the shape can be cut, and then `tiling` is filled; otherwise what is wrong with it.
inline const char *MakeTiling(const Shape &s, const Device &d, float scale, Tiling *tiling) {
    if (s.keyHeads == 0 || s.valueHeads == 0 || s.valueHeads % s.keyHeads != 0)
        return "value heads must be a multiple of key heads";
    if (s.keySize == 0 || s.keySize % 16 != 0 || s.keySize > kMaxHeadSize)
        return "key size must be a multiple of 16, 256 at most";
    if (s.valueSize == 0 || s.valueSize % 16 != 0 || s.valueSize > kMaxHeadSize)
        return "value size must be a multiple of 16, 256 at most";
    if (s.columns == 0 || s.columns > kMaxRows) return "state columns must be 1 to 16";
    if (s.stateBytes != 2 && s.stateBytes != 4) return "states must be bfloat16 or float32";
    if (d.cubeCores == 0 || d.vectorCores == 0) return "the device reports no cores";

    // The largest tile that divides the value size, so that no tile is cut short.
    uint32_t tile = s.valueSize;
    const uint32_t budget = d.vectorMemoryBytes > kReservedBytes ? d.vectorMemoryBytes - kReservedBytes : 0;
    while (tile > 0 && (s.valueSize % tile != 0 || tile % 8 != 0 ||
                        BuffersOf(s.keySize, s.valueSize, tile, s.stateBytes).total() > budget))
        tile -= 8;
    if (tile == 0) return "on-chip memory holds no tile of a state";

    const uint64_t units = uint64_t{s.requests} * s.valueHeads;
    *tiling = Tiling{};
    tiling->requests = s.requests;
    tiling->keyHeads = s.keyHeads;
    tiling->valueHeads = s.valueHeads;
    tiling->keySize = s.keySize;
    tiling->valueSize = s.valueSize;
    tiling->columns = s.columns;
    tiling->valueTile = tile;
    tiling->cubeCores = Smaller(units, d.cubeCores);
    tiling->vectorCores = Smaller(units, d.vectorCores);
    tiling->projectionFloats = 2ull * kMaxRows * s.valueSize;
    tiling->gramOffset = units * tiling->projectionFloats;
    const uint64_t grams = uint64_t{s.requests} * s.keyHeads * kGramFloats;
    tiling->workspaceBytes = (tiling->gramOffset + grams) * sizeof(float);
    tiling->scale = scale;
    return nullptr;
}

}  // namespace gdn_verify
