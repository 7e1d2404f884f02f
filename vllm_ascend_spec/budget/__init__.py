"""How many draft tokens to verify: pure policy in NumPy, without vLLM, torch or a device."""
