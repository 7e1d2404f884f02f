"""The plugin's changes as patches for vLLM and vllm-ascend, made against a source tree.

No text of theirs is kept here: an edit names a function, a call or an assignment, is placed by the
tree's own syntax, and reuses the tree's own text where it moves some. New files are ours.
"""
