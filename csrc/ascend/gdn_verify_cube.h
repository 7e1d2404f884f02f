// Cube half of gdn_verify: products of a step's rows with the state that it starts from.
//
// Not run on an NPU. For each (request, value head) with X = K, then X = Q: Y = X S^T, and for each
// (request, key head) the Gram blocks K K^T and Q K^T. Rows are raw: norms, gates and scale are
// applied by the vector half. Mathematics: kernels/gdn_verify/naive.py.
#pragma once

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "gdn_verify_tiling.h"

namespace gdn_verify {

// What a request does this step; read from device memory by every core for itself.
struct Request {
    uint32_t rows;   // 0: nothing is to be done
    int64_t begin;   // first row of the launch that is its own
    int64_t slot;    // state that it starts from
};

__aicore__ inline Request ReadRequest(uint32_t request, uint32_t columns,
                                      const AscendC::GlobalTensor<int32_t> &queryStartLoc,
                                      const AscendC::GlobalTensor<int32_t> &stateIndices,
                                      const AscendC::GlobalTensor<int32_t> &accepted) {
    Request found{0, queryStartLoc.GetValue(request), 0};
    const int64_t rows = queryStartLoc.GetValue(request + 1) - found.begin;
    const int32_t kept = accepted.GetValue(request);
    // The start does not depend on this step's length: a request may verify fewer rows than it
    // accepted last time.
    if (rows <= 0 || kept <= 0 || kept > static_cast<int32_t>(columns)) return found;
    found.slot = stateIndices.GetValue(uint64_t{request} * columns + kept - 1);
    if (found.slot <= 0) return found;
    found.rows = rows < columns ? static_cast<uint32_t>(rows) : columns;
    return found;
}

template <typename StateT>
class CubeHalf {
public:
    __aicore__ inline CubeHalf(AscendC::TPipe *pipe) : pipe_(pipe) {}

    // q, k: [N, keyHeads, keySize] in the states' type, as the cube multiplies equal types.
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR state, GM_ADDR queryStartLoc,
                                GM_ADDR stateIndices, GM_ADDR accepted, GM_ADDR workspace, const Tiling &tiling,
                                const TCubeTiling *cubeTiling) {
        t_ = tiling;
        q_.SetGlobalBuffer((__gm__ StateT *)q);
        k_.SetGlobalBuffer((__gm__ StateT *)k);
        state_.SetGlobalBuffer((__gm__ StateT *)state);
        queryStartLoc_.SetGlobalBuffer((__gm__ int32_t *)queryStartLoc);
        stateIndices_.SetGlobalBuffer((__gm__ int32_t *)stateIndices);
        accepted_.SetGlobalBuffer((__gm__ int32_t *)accepted);
        workspace_.SetGlobalBuffer((__gm__ float *)workspace);
        mm_.Init(cubeTiling, pipe_);
    }

    __aicore__ inline void Process() {
        const uint64_t units = uint64_t{t_.requests} * t_.valueHeads;
        const uint32_t group = t_.valueHeads / t_.keyHeads;
        for (uint64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
            const uint32_t request = unit / t_.valueHeads;
            const uint32_t head = unit % t_.valueHeads;
            const Request r = ReadRequest(request, t_.columns, queryStartLoc_, stateIndices_, accepted_);
            if (r.rows == 0) continue;
            const uint32_t keyHead = head / group;
            Project(r, unit, head, keyHead);
            if (head % group == 0) Gram(r, uint64_t{request} * t_.keyHeads + keyHead, keyHead);
        }
        mm_.End();
    }

private:
    using Rows = matmul::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, StateT, false>;
    using Transposed = matmul::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, StateT, true>;
    using Product = matmul::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, float>;

    __aicore__ inline uint64_t RowOffset(const Request &r, uint32_t keyHead) const {
        return (static_cast<uint64_t>(r.begin) * t_.keyHeads + keyHead) * t_.keySize;
    }

    __aicore__ inline void Project(const Request &r, uint64_t unit, uint32_t head, uint32_t keyHead) {
        const uint64_t stateAt =
            (static_cast<uint64_t>(r.slot) * t_.valueHeads + head) * t_.valueSize * t_.keySize;
        const uint64_t out = unit * t_.projectionFloats;
        // Rows of one key head lie keyHeads * keySize apart.
        mm_.SetOrgShape(kMaxRows, t_.valueSize, t_.keyHeads * t_.keySize, t_.keySize);
        mm_.SetSingleShape(r.rows, t_.valueSize, t_.keySize);
        mm_.SetTensorB(state_[stateAt], true);
        mm_.SetTensorA(k_[RowOffset(r, keyHead)]);
        mm_.IterateAll(workspace_[out]);
        mm_.SetTensorB(state_[stateAt], true);
        mm_.SetTensorA(q_[RowOffset(r, keyHead)]);
        mm_.IterateAll(workspace_[out + uint64_t{kMaxRows} * t_.valueSize]);
    }

    __aicore__ inline void Gram(const Request &r, uint64_t pair, uint32_t keyHead) {
        const uint32_t stride = t_.keyHeads * t_.keySize;
        const uint64_t out = t_.gramOffset + pair * kGramFloats;
        mm_.SetOrgShape(kMaxRows, kMaxRows, stride, stride);
        mm_.SetSingleShape(r.rows, r.rows, t_.keySize);
        mm_.SetTensorB(k_[RowOffset(r, keyHead)], true);
        mm_.SetTensorA(k_[RowOffset(r, keyHead)]);
        mm_.IterateAll(workspace_[out]);
        mm_.SetTensorB(k_[RowOffset(r, keyHead)], true);
        mm_.SetTensorA(q_[RowOffset(r, keyHead)]);
        mm_.IterateAll(workspace_[out + kMaxRows * kMaxRows]);
    }

    AscendC::TPipe *pipe_;
    Tiling t_;
    matmul::MatmulImpl<Rows, Transposed, Product, Product> mm_;
    AscendC::GlobalTensor<StateT> q_, k_, state_;
    AscendC::GlobalTensor<int32_t> queryStartLoc_, stateIndices_, accepted_;
    AscendC::GlobalTensor<float> workspace_;
};

}  // namespace gdn_verify
