// Ragged convolution and gated delta rule on the host, fp32, one token after the other.
//
// kernels/*/host.py turns the contracts of kernels/*/naive.py into rows: `starts` and `lengths`
// say which tokens a request has now (length 0: touch nothing), and slots say where state is read
// and written. The naive files are the oracle that this one is tested against.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace nb = nanobind;
template <typename T, int Rank>
using Array = nb::ndarray<T, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;
// A state pool is paged: the stride between slots may exceed the size of a slot.
template <typename T, int Rank>
using Pool = nb::ndarray<T, nb::ndim<Rank>, nb::device::cpu>;
using Index = Array<const int64_t, 1>;

namespace {

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// One step of one value head; state is [dv, dk] row-major:
//   S = a S ;  u = beta (v - S k) ;  S += u k^T ;  o = S q
void step(float* state, const float* q, const float* k, const float* v, float decay, float beta,
          float* out, int64_t dk, int64_t dv) {
  for (int64_t row = 0; row < dv; ++row) {
    float* s = state + row * dk;
    float projection = 0.0f;
    for (int64_t col = 0; col < dk; ++col) {
      s[col] *= decay;
      projection += s[col] * k[col];
    }
    const float update = beta * (v[row] - projection);
    float result = 0.0f;
    for (int64_t col = 0; col < dk; ++col) {
      s[col] += update * k[col];
      result += s[col] * q[col];
    }
    out[row] = result;
  }
}

}  // namespace

// q, k: [N, HK, dk] (normalised, q scaled); v, out: [N, HV, dv]; decay, beta: [N, HV];
// states: [slots, HV, dv, dk], a slot itself contiguous. starts, lengths, source: [R]; source is
// the slot read, or < 0 for a zero state. targets: [N] slot that takes the state after a token, or
// < 0 to keep nothing.
void gdn_rows(Array<const float, 3> q, Array<const float, 3> k, Array<const float, 3> v,
              Array<const float, 2> decay, Array<const float, 2> beta, Pool<float, 4> states,
              Index starts, Index lengths, Index source, Index targets, Array<float, 3> out) {
  const int64_t key_heads = q.shape(1), value_heads = v.shape(1), dk = q.shape(2), dv = v.shape(2);
  const int64_t group = value_heads / key_heads, head_size = dv * dk;
  float* pool = states.data();
  std::vector<float> state(static_cast<size_t>(head_size));
  for (size_t request = 0; request < lengths.shape(0); ++request) {
    for (int64_t head = 0; head < value_heads; ++head) {
      const auto at = [&](int64_t slot) {
        return pool + slot * states.stride(0) + head * states.stride(1);
      };
      if (lengths(request) <= 0) continue;
      if (source(request) < 0) {
        std::fill(state.begin(), state.end(), 0.0f);
      } else {
        std::copy_n(at(source(request)), head_size, state.begin());
      }
      for (int64_t t = 0; t < lengths(request); ++t) {
        const int64_t token = starts(request) + t;
        const int64_t key = (token * key_heads + head / group) * dk;
        const int64_t value = (token * value_heads + head) * dv;
        step(state.data(), q.data() + key, k.data() + key, v.data() + value, decay(token, head),
             beta(token, head), out.data() + value, dk, dv);
        if (targets(token) >= 0) std::copy_n(state.begin(), head_size, at(targets(token)));
      }
    }
  }
}

// x: [N, D] bfloat16 bits; weight: [W, D]; bias: [D]; windows: [slots, L, D] bfloat16 bits, a row
// itself contiguous; out: [N, D]. offsets: [R] first entry of the history, or < 0 for zeros. With
// `rewindable` a window keeps every row for a roll-back, otherwise the last W - 1 inputs.
void conv_rows(Array<const uint16_t, 2> x, Array<const float, 2> weight, Array<const float, 1> bias,
               Pool<uint16_t, 3> windows, Index starts, Index lengths, Index slots, Index offsets,
               bool rewindable, bool silu, Array<float, 2> out) {
  const int64_t dim = x.shape(1), width = weight.shape(0), history = width - 1;
  std::vector<uint16_t> sequence;
  for (size_t request = 0; request < lengths.shape(0); ++request) {
    const int64_t rows = lengths(request), first = starts(request);
    if (rows <= 0) continue;
    const auto entry = [&](int64_t index) {
      return windows.data() + slots(request) * windows.stride(0) + index * windows.stride(1);
    };
    sequence.assign(static_cast<size_t>((history + rows) * dim), 0);
    if (offsets(request) >= 0) {
      for (int64_t i = 0; i < history; ++i) {
        std::copy_n(entry(offsets(request) + i), dim, sequence.begin() + i * dim);
      }
    }
    std::copy_n(x.data() + first * dim, rows * dim, sequence.begin() + history * dim);
    for (int64_t t = 0; t < rows; ++t) {
      float* result = out.data() + (first + t) * dim;
      std::copy_n(bias.data(), dim, result);
      for (int64_t tap = 0; tap < width; ++tap) {
        const uint16_t* input = sequence.data() + (t + tap) * dim;
        const float* taps = weight.data() + tap * dim;
        for (int64_t d = 0; d < dim; ++d) result[d] += from_bfloat16(input[d]) * taps[d];
      }
      if (silu) {
        for (int64_t d = 0; d < dim; ++d) result[d] /= 1.0f + std::exp(-result[d]);
      }
    }
    const int64_t begin = rewindable ? 1 : rows;
    for (int64_t i = begin; i < history + rows; ++i) {
      std::copy_n(sequence.begin() + i * dim, dim, entry(i - begin));
    }
  }
}

NB_MODULE(_host, module) {
  module.doc() = "Host operators of vllm_ascend_spec; see kernels/*/host.py.";
  // noconvert: a silent copy of a pool or of the output would lose what is written to it.
  module.def("gdn_rows", &gdn_rows, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("decay"),
             nb::arg("beta"), nb::arg("states").noconvert(), nb::arg("starts"),
             nb::arg("lengths"), nb::arg("source"), nb::arg("targets"), nb::arg("out").noconvert());
  module.def("conv_rows", &conv_rows, nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
             nb::arg("windows").noconvert(), nb::arg("starts"), nb::arg("lengths"),
             nb::arg("slots"), nb::arg("offsets"), nb::arg("rewindable"), nb::arg("silu"),
             nb::arg("out").noconvert());
}
