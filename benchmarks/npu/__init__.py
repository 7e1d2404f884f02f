"""Benchmarks for an Ascend NPU host. No figure of theirs exists yet: nobody has run them there."""
