#!/bin/sh
# Environment that lowers Triton kernels for Ascend without an NPU and without CANN (tests/npu/test_lowering.py).
#   tools/npu_env.sh [DEST]     DEST defaults to $VLLM_ASCEND_SPEC_NPU_ENV, then to the user's cache
# A venv of its own: triton-ascend installs itself as `triton`, so it cannot live beside upstream Triton.
# Needs an x86_64 Linux and Python 3.11 (the one triton-ascend 3.2.0 has a wheel for); about 220 MB to fetch, 800 MB on disk.
set -eu
case "${1:-}" in -h|--help) sed -n 2,5p "$0"; exit 0;; esac
DEST=${1:-${VLLM_ASCEND_SPEC_NPU_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm_ascend_spec/npu_lowering}}
PYTHON=${PYTHON:-python3.11}
TRITON_ASCEND=3.2.0 ASCENDNPU_IR=1.2.0

command -v "$PYTHON" >/dev/null || { echo "npu_env.sh: no $PYTHON; set PYTHON to a Python 3.11" >&2; exit 1; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || { echo "npu_env.sh: the Ascend compiler's wheels are for x86_64 Linux" >&2; exit 1; }

mkdir -p "$DEST"
[ -x "$DEST/bin/python" ] || "$PYTHON" -m venv "$DEST"
# The two compilers declare no dependencies that lowering needs; numpy 2.3 breaks this Triton.
"$DEST/bin/pip" install -q --disable-pip-version-check pybind11 'numpy<2.3'
"$DEST/bin/pip" install -q --disable-pip-version-check --no-deps "triton-ascend==$TRITON_ASCEND" "ascendnpu-ir==$ASCENDNPU_IR"
"$DEST/bin/python" - <<'P'
import pathlib, ascendnpuir, triton
from triton.backends.ascend.compiler import AscendBackend
assert AscendBackend and (pathlib.Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile").exists()
print("triton-ascend", triton.__version__)
P
echo "ready: $DEST"
