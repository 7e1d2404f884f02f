// torch.ops.vllm_ascend_spec.gdn_verify for NPU tensors. Not run on an NPU.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

#include "gdn_verify_host.h"
#include "gdn_verify_launch.h"

namespace {

void Check(const at::Tensor &tensor, const char *name, at::ScalarType type, int64_t dimensions) {
    TORCH_CHECK(tensor.device().type() == at::DeviceType::PrivateUse1, "gdn_verify: ", name, " must be on an NPU");
    TORCH_CHECK(tensor.scalar_type() == type, "gdn_verify: ", name, " must be ", type, ", is ", tensor.scalar_type());
    TORCH_CHECK(tensor.dim() == dimensions, "gdn_verify: ", name, " must have ", dimensions, " dimensions, has ",
                tensor.dim());
    TORCH_CHECK(tensor.is_contiguous(), "gdn_verify: ", name, " must be contiguous");
}

void CheckSizes(const at::Tensor &tensor, const char *name, at::IntArrayRef sizes) {
    TORCH_CHECK(tensor.sizes() == sizes, "gdn_verify: ", name, " must be ", sizes, ", is ", tensor.sizes());
}

// The tiling of these sizes in device memory. Made once and kept: a copy from the host cannot be in
// a captured graph, and warm-up runs every shape before it is captured.
at::Tensor DeviceTiling(const gdn_verify::Tiling &cut, bool floatState, const at::Tensor &like) {
    static std::mutex lock;
    static auto *kept = new std::map<std::string, at::Tensor>;  // outlives the device at exit
    std::string key = like.device().str() + (floatState ? " float" : " bfloat16");
    for (uint64_t size : {cut.requests, cut.keyHeads, cut.valueHeads, cut.keySize, cut.valueSize, cut.columns})
        key += " " + std::to_string(size);
    key += " " + std::to_string(cut.scale);
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = kept->find(key);
    if (found != kept->end()) return found->second;
    gdn_verify::LaunchTiling launch{};
    launch.cut = cut;
    TORCH_CHECK(gdn_verify::MakeCubeTiling(cut, floatState, &launch.cube), "gdn_verify: CANN finds no cube tiling");
    const auto host = at::empty({static_cast<int64_t>(sizeof launch)}, at::kByte);
    std::memcpy(host.data_ptr(), &launch, sizeof launch);
    return (*kept)[key] = host.to(like.device());
}

// Contract: kernels/gdn_verify/naive.py, with q and k raw. A request without rows, with nothing
// accepted or with a null start slot touches nothing; its rows of the result are 0.
at::Tensor GdnVerify(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const at::Tensor &logDecay,
                     const at::Tensor &beta, at::Tensor &states, const at::Tensor &queryStartLoc,
                     const at::Tensor &stateIndices, const at::Tensor &numAccepted, double scale) {
    const auto bf16 = at::kBFloat16;
    Check(q, "q", bf16, 3);
    Check(k, "k", bf16, 3);
    Check(v, "v", bf16, 3);
    Check(logDecay, "log_decay", at::kFloat, 2);
    Check(beta, "beta", at::kFloat, 2);
    Check(queryStartLoc, "query_start_loc", at::kInt, 1);
    Check(stateIndices, "state_indices", at::kInt, 2);
    Check(numAccepted, "num_accepted", at::kInt, 1);
    const bool floatState = states.scalar_type() == at::kFloat;
    Check(states, "states", floatState ? at::kFloat : bf16, 4);

    const int64_t tokens = q.size(0), requests = stateIndices.size(0), valueHeads = v.size(1);
    CheckSizes(k, "k", q.sizes());
    CheckSizes(v, "v", {tokens, valueHeads, v.size(2)});
    CheckSizes(logDecay, "log_decay", {tokens, valueHeads});
    CheckSizes(beta, "beta", {tokens, valueHeads});
    CheckSizes(states, "states", {states.size(0), valueHeads, v.size(2), q.size(2)});
    CheckSizes(queryStartLoc, "query_start_loc", {requests + 1});
    CheckSizes(numAccepted, "num_accepted", {requests});

    at::Tensor out = at::zeros_like(v);
    if (requests == 0 || tokens == 0) return out;
    const auto size = [](int64_t n) { return static_cast<uint32_t>(n); };
    const gdn_verify::Shape shape{size(requests),  size(q.size(1)),
                                  size(valueHeads), size(q.size(2)),
                                  size(v.size(2)),  size(stateIndices.size(1)),
                                  size(states.element_size())};
    gdn_verify::Tiling tiling;
    const char *problem =
        gdn_verify::MakeTiling(shape, gdn_verify::CurrentDevice(), static_cast<float>(scale), &tiling);
    TORCH_CHECK(problem == nullptr, "gdn_verify: ", problem);
    const auto deviceTiling = DeviceTiling(tiling, floatState, q);
    const auto cubeQ = q.to(states.scalar_type()), cubeK = k.to(states.scalar_type());
    const auto workspace = at::empty({static_cast<int64_t>(tiling.workspaceBytes)}, q.options().dtype(at::kByte));
    const gdn_verify::Tensors tensors{
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        logDecay.data_ptr(),
        beta.data_ptr(),
        states.data_ptr(),
        queryStartLoc.data_ptr(),
        stateIndices.data_ptr(),
        numAccepted.data_ptr(),
        cubeQ.data_ptr(),
        cubeK.data_ptr(),
        workspace.data_ptr(),
        deviceTiling.data_ptr(),
        out.data_ptr(),
    };
    // torch_npu queues its own operators; a launch beside the queue could overtake them.
    void *stream = c10_npu::getCurrentNPUStream().stream();
    at_npu::native::OpCommand command;
    command.Name("gdn_verify");
    command.SetCustomHandler([=]() -> int {
        gdn_verify::Launch(stream, tensors, tiling, floatState);
        return 0;
    });
    command.Run();
    return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vllm_ascend_spec, library) {
    library.def(
        "gdn_verify(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor(a!) states, "
        "Tensor query_start_loc, Tensor state_indices, Tensor num_accepted, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(vllm_ascend_spec, PrivateUse1, library) { library.impl("gdn_verify", &GdnVerify); }
