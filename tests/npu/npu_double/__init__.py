"""Double of an NPU: vllm-ascend's own source runs on a host with neither NPU nor CANN.

Real: torch_npu (dispatcher, allocator, streams, argument checks), vLLM, vllm-ascend, this plugin.
Doubled: the runtime library below torch_npu (fakeacl.c), the values of operators (device.py,
operators_*.py) and the Triton compiler (triton_host.py, the interpreter). A test that passes here
says nothing about CANN's operators, timing, graph replay or races between streams.
"""
