// Double of AscendC's Matmul: the products themselves, in double precision, every address checked.
#pragma once
#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"

enum class CubeFormat { ND };

namespace matmul {

template <AscendC::TPosition, CubeFormat, typename T, bool Transposed = false>
struct MatmulType {
    using Number = T;
    static constexpr bool transposed = Transposed;
};

template <typename A, typename B, typename C, typename Bias>
class MatmulImpl {
public:
    void Init(const TCubeTiling *tiling, AscendC::TPipe *) { ascendc_double::Require(tiling, "no cube tiling"); }

    void SetOrgShape(int m, int n, int ka, int kb) { orgM_ = m, orgN_ = n, lda_ = ka, ldb_ = kb; }

    void SetSingleShape(int m, int n, int k) {
        using ascendc_double::Require;
        Require(m > 0 && m <= orgM_ && n > 0 && n <= orgN_, "single shape exceeds the original one");
        Require(k > 0 && k <= lda_ && k <= ldb_, "single depth exceeds a row");
        m_ = m, n_ = n, k_ = k;
    }

    void SetTensorA(AscendC::GlobalTensor<typename A::Number> a, bool transposed = false) {
        ascendc_double::Require(!transposed, "A is declared as it lies");
        a_ = a, haveA_ = true;
    }

    void SetTensorB(AscendC::GlobalTensor<typename B::Number> b, bool transposed = false) {
        ascendc_double::Require(transposed == B::transposed, "B's layout differs from its type");
        b_ = b, haveB_ = true;
    }

    void IterateAll(AscendC::GlobalTensor<typename C::Number> c) {
        ascendc_double::Require(haveA_ && haveB_ && m_, "IterateAll without A, B or a shape");
        for (int i = 0; i < m_; ++i)
            for (int j = 0; j < n_; ++j) {
                double sum = 0;
                for (int l = 0; l < k_; ++l)
                    sum += double(ToFloat(a_.Read(uint64_t(i) * lda_ + l))) *
                           double(ToFloat(b_.Read(uint64_t(j) * ldb_ + l)));
                c.Write(uint64_t(i) * orgN_ + j, static_cast<typename C::Number>(sum));
            }
        haveA_ = haveB_ = false;
    }

    void End() {}

private:
    int orgM_ = 0, orgN_ = 0, lda_ = 0, ldb_ = 0, m_ = 0, n_ = 0, k_ = 0;
    bool haveA_ = false, haveB_ = false;
    AscendC::GlobalTensor<typename A::Number> a_;
    AscendC::GlobalTensor<typename B::Number> b_;
};

}  // namespace matmul
