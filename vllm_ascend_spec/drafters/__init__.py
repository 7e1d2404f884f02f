"""What the engine must know of each drafting method; one table, no vLLM."""

from vllm_ascend_spec.drafters.methods import METHODS, Confidence, Drafting, Method, method

__all__ = ["METHODS", "Confidence", "Drafting", "Method", "method"]
