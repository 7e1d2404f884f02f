// Ragged gated-delta-rule verification on the host, one token after the other in fp32.
// Contract and names as in kernels/gdn_verify/naive.py, which is the oracle this file is tested against.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace nb = nanobind;
template <typename T, int Rank>
using Array = nb::ndarray<T, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;

namespace {

// One step of one value head: state S is [dv, dk] row-major.
//   S = a S ;  u = beta (v - S k) ;  S += u k^T ;  o = S q
void step(float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out,
          int64_t dk, int64_t dv) {
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
// states: [slots, HV, dv, dk] updated in place; starts: [R + 1]; source: [R] slot read, or < 0 for a row that touches
// nothing; targets: [R, T] slot written after each row.
void gdn_verify(Array<const float, 3> q, Array<const float, 3> k, Array<const float, 3> v, Array<const float, 2> decay,
                Array<const float, 2> beta, Array<float, 4> states, Array<const int64_t, 1> starts,
                Array<const int64_t, 1> source, Array<const int64_t, 2> targets, Array<float, 3> out) {
  const int64_t requests = source.shape(0), columns = targets.shape(1);
  const int64_t key_heads = q.shape(1), value_heads = v.shape(1), dk = q.shape(2), dv = v.shape(2);
  const int64_t group = value_heads / key_heads, head_size = dv * dk, slot_size = value_heads * head_size;
  std::vector<float> state(static_cast<size_t>(head_size));
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t first = starts(request), rows = starts(request + 1) - first;
    if (rows <= 0 || source(request) < 0) continue;
    for (int64_t head = 0; head < value_heads; ++head) {
      const float* begin = states.data() + source(request) * slot_size + head * head_size;
      std::copy(begin, begin + head_size, state.begin());
      for (int64_t t = 0; t < std::min(rows, columns); ++t) {
        const int64_t token = first + t;
        step(state.data(), q.data() + (token * key_heads + head / group) * dk,
             k.data() + (token * key_heads + head / group) * dk, v.data() + (token * value_heads + head) * dv,
             decay(token, head), beta(token, head), out.data() + (token * value_heads + head) * dv, dk, dv);
        float* target = states.data() + targets(request, t) * slot_size + head * head_size;
        std::copy(state.begin(), state.end(), target);
      }
    }
  }
}

NB_MODULE(_host, module) {
  module.doc() = "Host operators of vllm_ascend_spec.";
  module.def("gdn_verify", &gdn_verify, "Ragged gated-delta-rule verification; see kernels/gdn_verify/naive.py.");
}
