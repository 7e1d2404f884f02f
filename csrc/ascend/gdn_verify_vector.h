// Vector half of gdn_verify: the small triangular system, the outputs, and a state after each row.
//
// Not run on an NPU. With unit-norm keys, decays a_t, gates b_t, D_t = a_1 .. a_t and the cube half's
// Y = X S_0^T:
//
//     u_t = b_t (v_t - D_t Y_k[t] - sum_{s<t} (D_t / D_s) (k_s . k_t) u_s)
//     o_t = D_t Y_q[t] + sum_{s<=t} (D_t / D_s) (k_s . q_t) u_s
//     S_t = a_t S_{t-1} + u_t k_t^T
//
// The quotients are running products of decays, so nothing is divided by a small number.
#pragma once

#include "gdn_verify_cube.h"

namespace gdn_verify {

using AscendC::HardEvent;

template <HardEvent Event>
__aicore__ inline void Await() {
    const event_t id = static_cast<event_t>(GetTPipePtr()->FetchEventID(Event));
    AscendC::SetFlag<Event>(id);
    AscendC::WaitFlag<Event>(id);
}

template <typename StateT>
class VectorHalf {
public:
    __aicore__ inline VectorHalf(AscendC::TPipe *pipe) : pipe_(pipe) {}

    // q, k: bfloat16 [N, keyHeads, keySize]; v, out: bfloat16 [N, valueHeads, valueSize]; logDecay,
    // beta: float [N, valueHeads].
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR logDecay, GM_ADDR beta, GM_ADDR state,
                                GM_ADDR queryStartLoc, GM_ADDR stateIndices, GM_ADDR accepted,
                                GM_ADDR workspace, GM_ADDR out, const Tiling &tiling) {
        t_ = tiling;
        q_.SetGlobalBuffer((__gm__ bfloat16_t *)q);
        k_.SetGlobalBuffer((__gm__ bfloat16_t *)k);
        v_.SetGlobalBuffer((__gm__ bfloat16_t *)v);
        out_.SetGlobalBuffer((__gm__ bfloat16_t *)out);
        logDecay_.SetGlobalBuffer((__gm__ float *)logDecay);
        beta_.SetGlobalBuffer((__gm__ float *)beta);
        state_.SetGlobalBuffer((__gm__ StateT *)state);
        queryStartLoc_.SetGlobalBuffer((__gm__ int32_t *)queryStartLoc);
        stateIndices_.SetGlobalBuffer((__gm__ int32_t *)stateIndices);
        accepted_.SetGlobalBuffer((__gm__ int32_t *)accepted);
        workspace_.SetGlobalBuffer((__gm__ float *)workspace);
        Allocate();
    }

    __aicore__ inline void Process() {
        const uint64_t units = uint64_t{t_.requests} * t_.valueHeads;
        for (uint64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
            const uint32_t request = unit / t_.valueHeads;
            const uint32_t head = unit % t_.valueHeads;
            const Request r = ReadRequest(request, t_.columns, queryStartLoc_, stateIndices_, accepted_);
            if (r.rows == 0) continue;
            LoadRows(r, unit, request, head);
            Solve(r);
            StoreOutput(r, head);
            WriteStates(r, request, head);
            // The next unit loads over what this one still stores and reads.
            Await<HardEvent::MTE3_MTE2>();
            Await<HardEvent::V_MTE2>();
            Await<HardEvent::S_MTE2>();
        }
        for (uint32_t i = 0; i < kStages; ++i) pipe_->ReleaseEventID<HardEvent::MTE3_V>(stageEvent_[i]);
    }

private:
    static constexpr float kNormEpsilon = 1e-6f;

    __aicore__ inline void Allocate() {
        const VectorBuffers b = BuffersOf(t_.keySize, t_.valueSize, t_.valueTile, sizeof(StateT));
        pipe_->InitBuffer(inputBuf_, b.input);
        pipe_->InitBuffer(keyBuf_, b.rows);
        pipe_->InitBuffer(queryBuf_, b.query);
        pipe_->InitBuffer(valueBuf_, b.value);
        pipe_->InitBuffer(projectionBuf_, b.projection);
        pipe_->InitBuffer(updateBuf_, b.update);
        pipe_->InitBuffer(outputBuf_, b.output);
        pipe_->InitBuffer(decayBuf_, b.gates / 2);
        pipe_->InitBuffer(betaBuf_, b.gates / 2);
        pipe_->InitBuffer(gramBuf_, b.gram);
        pipe_->InitBuffer(keyNormBuf_, b.norms / 2);
        pipe_->InitBuffer(queryNormBuf_, b.norms / 2);
        pipe_->InitBuffer(scratchBuf_, b.scratch);
        pipe_->InitBuffer(stateBuf_, b.state);
        for (uint32_t i = 0; i < kStages; ++i) {
            pipe_->InitBuffer(stageBuf_[i], b.stage);
            // Reserved, so that FetchEventID hands out others.
            stageEvent_[i] = static_cast<event_t>(pipe_->AllocEventID<HardEvent::MTE3_V>());
        }
    }

    // `rows` pieces of `size` numbers, `stride` numbers apart, packed on chip.
    template <typename T>
    __aicore__ inline void Load(const AscendC::LocalTensor<T> &to, const AscendC::GlobalTensor<T> &from,
                                uint32_t rows, uint32_t size, uint32_t stride) {
        AscendC::DataCopyExtParams shape{static_cast<uint16_t>(rows), static_cast<uint32_t>(size * sizeof(T)),
                                         static_cast<uint32_t>((stride - size) * sizeof(T)), 0, 0};
        AscendC::DataCopyPadExtParams<T> noPadding{false, 0, 0, 0};
        AscendC::DataCopyPad(to, from, shape, noPadding);
    }

    __aicore__ inline void LoadRows(const Request &r, uint64_t unit, uint32_t request, uint32_t head) {
        const uint32_t keyHead = head / (t_.valueHeads / t_.keyHeads);
        const uint64_t keyAt = (static_cast<uint64_t>(r.begin) * t_.keyHeads + keyHead) * t_.keySize;
        const uint64_t gateAt = static_cast<uint64_t>(r.begin) * t_.valueHeads + head;
        const uint64_t valueAt = gateAt * t_.valueSize;
        const uint64_t pair = uint64_t{request} * t_.keyHeads + keyHead;

        auto projection = projectionBuf_.Get<float>();
        const uint64_t half = uint64_t{kMaxRows} * t_.valueSize;
        for (uint32_t part = 0; part < 2; ++part)
            Load(projection[part * half], workspace_[unit * t_.projectionFloats + part * half], r.rows,
                 t_.valueSize, t_.valueSize);
        Load(gramBuf_.Get<float>(), workspace_[t_.gramOffset + pair * kGramFloats], 2 * kMaxRows, kMaxRows,
             kMaxRows);
        Load(decayBuf_.Get<float>(), logDecay_[gateAt], r.rows, 1, t_.valueHeads);
        Load(betaBuf_.Get<float>(), beta_[gateAt], r.rows, 1, t_.valueHeads);

        LoadWide(keyBuf_.Get<float>(), k_[keyAt], r.rows, t_.keySize, t_.keyHeads * t_.keySize);
        LoadWide(queryBuf_.Get<float>(), q_[keyAt], r.rows, t_.keySize, t_.keyHeads * t_.keySize);
        LoadWide(valueBuf_.Get<float>(), v_[valueAt], r.rows, t_.valueSize, t_.valueHeads * t_.valueSize);

        InverseNorms(keyNormBuf_.Get<float>(), keyBuf_.Get<float>(), r.rows);
        InverseNorms(queryNormBuf_.Get<float>(), queryBuf_.Get<float>(), r.rows);
        auto decay = decayBuf_.Get<float>();
        AscendC::Exp(decay, decay, r.rows * kBlockFloats);
        Await<HardEvent::V_S>();
        Await<HardEvent::MTE2_S>();
        auto key = keyBuf_.Get<float>();
        for (uint32_t t = 0; t < r.rows; ++t) {
            keyNorm_[t] = keyNormBuf_.Get<float>().GetValue(t * kBlockFloats);
            queryNorm_[t] = queryNormBuf_.Get<float>().GetValue(t * kBlockFloats) * t_.scale;
            decay_[t] = decay.GetValue(t * kBlockFloats);
            gate_[t] = betaBuf_.Get<float>().GetValue(t * kBlockFloats);
            AscendC::Muls(key[t * t_.keySize], key[t * t_.keySize], keyNorm_[t], t_.keySize);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void LoadWide(const AscendC::LocalTensor<float> &to,
                                    const AscendC::GlobalTensor<bfloat16_t> &from, uint32_t rows, uint32_t size,
                                    uint32_t stride) {
        auto narrow = inputBuf_.Get<bfloat16_t>();
        Await<HardEvent::V_MTE2>();  // the cast before may still read the buffer
        Load(narrow, from, rows, size, stride);
        Await<HardEvent::MTE2_V>();
        AscendC::Cast(to, narrow, AscendC::RoundMode::CAST_NONE, rows * size);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // 1 / |row| of each row, one number a block.
    __aicore__ inline void InverseNorms(const AscendC::LocalTensor<float> &norms,
                                        const AscendC::LocalTensor<float> &rows, uint32_t count) {
        auto scratch = scratchBuf_.Get<float>();
        auto square = scratch[kBlockFloats];
        auto work = square[t_.keySize];
        const uint32_t used = count * kBlockFloats;
        AscendC::Duplicate(norms, 1.0f, used);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t t = 0; t < count; ++t) {
            AscendC::Mul(square, rows[t * t_.keySize], rows[t * t_.keySize], t_.keySize);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceSum(norms[t * kBlockFloats], square, work, t_.keySize);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Adds(norms, norms, kNormEpsilon, used);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sqrt(norms, norms, used);
        AscendC::PipeBarrier<PIPE_V>();
        auto ones = scratch;
        AscendC::Duplicate(ones, 1.0f, kBlockFloats);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t t = 0; t < count; ++t)
            AscendC::Div(norms[t * kBlockFloats], ones, norms[t * kBlockFloats], kBlockFloats);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Updates into updateBuf_, outputs over the projections of the queries.
    __aicore__ inline void Solve(const Request &r) {
        auto gram = gramBuf_.Get<float>();
        auto value = valueBuf_.Get<float>();
        auto update = updateBuf_.Get<float>();
        auto fromState = projectionBuf_.Get<float>();
        auto output = fromState[kMaxRows * t_.valueSize];
        float since[kMaxRows];  // D_t / D_s
        float all = 1.0f;       // D_t
        for (uint32_t t = 0; t < r.rows; ++t) {
            all *= decay_[t];
            auto u = update[t * t_.valueSize];
            auto o = output[t * t_.valueSize];
            auto y = fromState[t * t_.valueSize];
            AscendC::Muls(y, y, -all * keyNorm_[t], t_.valueSize);
            AscendC::Muls(o, o, all * queryNorm_[t], t_.valueSize);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(u, value[t * t_.valueSize], y, t_.valueSize);
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t s = 0; s < t; ++s) {
                since[s] *= decay_[t];
                const float kk = gram.GetValue(t * kMaxRows + s) * keyNorm_[t] * keyNorm_[s];
                AscendC::Axpy(u, update[s * t_.valueSize], -since[s] * kk, t_.valueSize);
                AscendC::PipeBarrier<PIPE_V>();
            }
            since[t] = 1.0f;
            AscendC::Muls(u, u, gate_[t], t_.valueSize);
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t s = 0; s <= t; ++s) {
                const float qk = gram.GetValue((kMaxRows + t) * kMaxRows + s) * queryNorm_[t] * keyNorm_[s];
                AscendC::Axpy(o, update[s * t_.valueSize], since[s] * qk, t_.valueSize);
                AscendC::PipeBarrier<PIPE_V>();
            }
        }
    }

    __aicore__ inline void StoreOutput(const Request &r, uint32_t head) {
        auto wide = projectionBuf_.Get<float>()[kMaxRows * t_.valueSize];
        auto narrow = outputBuf_.Get<bfloat16_t>();
        AscendC::Cast(narrow, wide, AscendC::RoundMode::CAST_RINT, r.rows * t_.valueSize);
        Await<HardEvent::V_MTE3>();
        const uint64_t at = (static_cast<uint64_t>(r.begin) * t_.valueHeads + head) * t_.valueSize;
        AscendC::DataCopyExtParams shape{
            static_cast<uint16_t>(r.rows), static_cast<uint32_t>(t_.valueSize * sizeof(bfloat16_t)), 0,
            static_cast<uint32_t>((t_.valueHeads - 1) * t_.valueSize * sizeof(bfloat16_t)), 0};
        AscendC::DataCopyPad(out_[at], narrow, shape);
    }

    __aicore__ inline void WriteStates(const Request &r, uint32_t request, uint32_t head) {
        auto tile = stateBuf_.Get<float>();
        auto key = keyBuf_.Get<float>();
        auto update = updateBuf_.Get<float>();
        const uint32_t size = t_.valueTile * t_.keySize;
        Await<HardEvent::V_S>();  // the updates are read one number at a time below
        for (uint32_t first = 0; first < t_.valueSize; first += t_.valueTile) {
            LoadState(tile, StateOffset(r.slot, head, first), size);
            for (uint32_t t = 0; t < r.rows; ++t) {
                AscendC::Muls(tile, tile, decay_[t], size);
                AscendC::PipeBarrier<PIPE_V>();
                for (uint32_t i = 0; i < t_.valueTile; ++i)
                    AscendC::Axpy(tile[i * t_.keySize], key[t * t_.keySize],
                                  update.GetValue(t * t_.valueSize + first + i), t_.keySize);
                AscendC::PipeBarrier<PIPE_V>();
                const int64_t slot = stateIndices_.GetValue(uint64_t{request} * t_.columns + t);
                if (slot > 0) StoreState(tile, StateOffset(slot, head, first), size);
            }
        }
        for (uint32_t i = 0; i < kStages; ++i) AwaitStage(i);
        stored_ = 0;
    }

    __aicore__ inline uint64_t StateOffset(int64_t slot, uint32_t head, uint32_t first) const {
        const uint64_t state = static_cast<uint64_t>(slot) * t_.valueHeads + head;
        return (state * t_.valueSize + first) * t_.keySize;
    }

    __aicore__ inline void LoadState(const AscendC::LocalTensor<float> &tile, uint64_t at, uint32_t size) {
        if constexpr (sizeof(StateT) == sizeof(float)) {
            Await<HardEvent::V_MTE2>();
            Load(tile, state_[at], 1, size, size);
            Await<HardEvent::MTE2_V>();
        } else {
            // A stage is free once its store has read it; stages take turns.
            auto narrow = stageBuf_[stored_ % kStages].template Get<StateT>();
            AwaitStage(stored_ % kStages);
            Await<HardEvent::V_MTE2>();
            Await<HardEvent::MTE3_MTE2>();
            Load(narrow, state_[at], 1, size, size);
            Await<HardEvent::MTE2_V>();
            AscendC::Cast(tile, narrow, AscendC::RoundMode::CAST_NONE, size);
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    __aicore__ inline void StoreState(const AscendC::LocalTensor<float> &tile, uint64_t at, uint32_t size) {
        const uint32_t turn = stored_ % kStages;
        AwaitStage(turn);
        auto stage = stageBuf_[turn].template Get<StateT>();
        if constexpr (sizeof(StateT) == sizeof(float)) {
            AscendC::Muls(stage, tile, 1.0f, size);
        } else {
            AscendC::Cast(stage, tile, AscendC::RoundMode::CAST_RINT, size);
        }
        Await<HardEvent::V_MTE3>();
        AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>(size * sizeof(StateT)), 0, 0, 0};
        AscendC::DataCopyPad(state_[at], stage, shape);
        AscendC::SetFlag<HardEvent::MTE3_V>(stageEvent_[turn]);
        pending_[turn] = true;
        ++stored_;
    }

    __aicore__ inline void AwaitStage(uint32_t turn) {
        if (!pending_[turn]) return;
        AscendC::WaitFlag<HardEvent::MTE3_V>(stageEvent_[turn]);
        pending_[turn] = false;
    }

    AscendC::TPipe *pipe_;
    Tiling t_;
    float keyNorm_[kMaxRows], queryNorm_[kMaxRows], decay_[kMaxRows], gate_[kMaxRows];
    uint32_t stored_ = 0;
    event_t stageEvent_[kStages];
    bool pending_[kStages] = {};
    AscendC::GlobalTensor<bfloat16_t> q_, k_, v_, out_;
    AscendC::GlobalTensor<float> logDecay_, beta_, workspace_;
    AscendC::GlobalTensor<StateT> state_;
    AscendC::GlobalTensor<int32_t> queryStartLoc_, stateIndices_, accepted_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> inputBuf_, keyBuf_, queryBuf_, valueBuf_, projectionBuf_,
        updateBuf_, outputBuf_, decayBuf_, betaBuf_, gramBuf_, keyNormBuf_, queryNormBuf_, scratchBuf_,
        stateBuf_, stageBuf_[kStages];
};

}  // namespace gdn_verify
