# One round on a GPU host: sh benchmarks/kernels/round.sh FOLDER [short]
# Figures as JSON and logs in FOLDER, what has a bar or is wrong at the end. About seven minutes; short:
# what has a bar of gdn_verify and max_softmax, 80 seconds.
out=${1:?folder for the results}
mkdir -p "$out"
began=$(date +%s)
python3 -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)"

# Without nvcc there, lib*.so lie in vllm_ascend_spec/, built where there is one:
# python -m kernels._cuda_library vllm_ascend_spec
for name in gdn_verify pack_rows; do
  python3 -c "
import benchmarks.kernels
from vllm_ascend_spec.kernels import _cuda_library
print(_cuda_library.library('$name'))" &
done
wait

run() {
  name=$1; seconds=$2; shift 2
  timeout "$seconds" python3 -m "benchmarks.kernels.$name" --json "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $(wc -l < "$out/$name.log") lines, $(($(date +%s) - began)) s since the start"
}
nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,clocks_event_reasons.active,power.draw,temperature.gpu \
  --format=csv -lms 500 > "$out/clocks.csv" 2>&1 &
clocks=$!
if [ "$2" = short ]; then
  timeout 85 python3 -m benchmarks.kernels.several "$out" "gdn_verify_cuda --only bf16" \
    "gdn_verify_cuda --only fp32" max_softmax gdn_verify_native
else
  run pack_rows 40
  run gdn_verify_cuda 110
  run gdn_verify_native 60 --tune
  run max_softmax 40 --tune
  if command -v ncu > /dev/null; then
    timeout 40 ncu --clock-control none -k "regex:(pipeline|direct|streamed)_kernel" \
      --section SpeedOfLight --section Occupancy --section WarpStateStats --section SchedulerStats \
      --section MemoryWorkloadAnalysis --section LaunchStats --section SourceCounters \
      --import-source no -f -o "$out/gdn_verify" \
      python3 -m benchmarks.kernels.gdn_verify_profile > "$out/ncu.log" 2>&1
    echo "ncu: exit $?, $(($(date +%s) - began)) s since the start"
    ncu --import "$out/gdn_verify.ncu-rep" --page details --csv > "$out/ncu_details.csv" 2>&1
    ncu --import "$out/gdn_verify.ncu-rep" --page source --csv > "$out/ncu_source.csv" 2>&1
  fi
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
      timeout 60 compute-sanitizer --tool "$tool" --print-limit 5 python3 -c "
import benchmarks.kernels
from benchmarks.kernels.gdn_verify_cuda import check_one
from vllm_ascend_spec.kernels.gdn_verify import cuda
opened = cuda.library()
check_one(str(opened.path), next(v.number for v in opened.variants if 'pipeline' in v.name))
" > "$out/$tool.log" 2>&1
      echo "$tool: exit $?, $(tail -n 1 "$out/$tool.log")"
    done
  fi
  timeout 50 python3 -m pytest -q -x -p no:cacheprovider tests/kernels/test_gdn_verify_cuda.py \
    tests/kernels/test_gdn_verify_replay.py -k "cuda or graph or fp32 or float32" \
    > "$out/pytest.log" 2>&1
  echo "pytest: exit $?, $(tail -n 1 "$out/pytest.log")"
fi
kill "$clocks"
grep -hE "right|WRONG" "$out"/*.log
sort -u -t, -k2,4 "$out/clocks.csv" | head -n 12
grep -hE "us  |bar |speedup|Error|error over" "$out"/*.log
