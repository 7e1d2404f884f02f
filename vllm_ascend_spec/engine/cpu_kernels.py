"""Torch twins of kernels that cost most under Triton's interpreter."""


def register() -> None:
    """Register the twins with vLLM's kernel dispatcher; once per process is enough."""
