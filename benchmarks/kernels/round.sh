# One round on a GPU host: sh benchmarks/kernels/round.sh FOLDER
# Figures as JSON and logs in FOLDER, what has a bar or is wrong at the end. About four minutes.
out=${1:?folder for the results}
mkdir -p "$out"
python3 -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)"

# Compilers outside the time limits below.
python3 -c "
import benchmarks.kernels
from vllm_ascend_spec.kernels import _cuda_library
for name in ('gdn_verify', 'pack_rows'):
    print(_cuda_library.library(name))"

run() {
  name=$1; seconds=$2; shift 2
  timeout "$seconds" python3 -m "benchmarks.kernels.$name" --json "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $(wc -l < "$out/$name.log") lines"
}
run gdn_verify_cuda 150
grep -E "^  (CUDA|Triton|us at|right|WRONG)" "$out/gdn_verify_cuda.log"
run pack_rows 90
run max_softmax 50 --tune
run conv_verify 45 --tune
grep -hE "warps x|num_warps" "$out/max_softmax.log" "$out/conv_verify.log"
grep -hE " bar |speedup|Error|error over" "$out"/gdn_verify_cuda.log "$out"/pack_rows.log "$out"/max_softmax.log "$out"/conv_verify.log
