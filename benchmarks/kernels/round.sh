# One round on a GPU host: sh benchmarks/kernels/round.sh FOLDER
# Figures as JSON and logs in FOLDER, what has a bar or is wrong at the end. About four minutes.
out=${1:?folder for the results}
mkdir -p "$out"
python3 -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)"

# Launch cuts of the native layout, each in its own process: every one compiles for seconds.
for number in 0 1 2 3 4 5 6; do
  python3 -c "
import sys
from benchmarks.kernels import _gdn, gdn_verify as g
cut = g.NATIVE_CONFIGS[$number]
for state in (g.FP32, g.BF16):
    for _ in range(2):
        print('native', cut, state, _gdn.native_errors(state, g.NativeConfig(*cut)), flush=True)
" > "$out/native_$number.log" 2>&1 &
done
wait
cat "$out"/native_?.log | grep native

run() {
  name=$1; seconds=$2; shift 2
  timeout "$seconds" python3 -m "benchmarks.kernels.$name" --json "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $(wc -l < "$out/$name.log") lines"
}
run gdn_verify_cuda 150
grep -E "^  (CUDA|Triton|us at|right|WRONG)" "$out/gdn_verify_cuda.log"
run pack_rows 30
run max_softmax 50 --tune
run conv_verify 45 --tune
grep -hE "group|num_warps" "$out/max_softmax.log" "$out/conv_verify.log"
grep -hE " bar |speedup|Error|error over" "$out"/gdn_verify_cuda.log "$out"/pack_rows.log "$out"/max_softmax.log "$out"/conv_verify.log
