"""Child process: an engine's cache and norms as vLLM bound and loaded them, as JSON.

Run as `python inspect_case.py REQUEST.json ANSWER.json`. Before its prompts are answered, the whole
pool is filled with `SENTINEL`; what has another value after is what was written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_ascend_spec.engine import packages
from vllm_ascend_spec.engine.launch import make_llm, model_runner

SENTINEL = 0x3B
UNIT = 1024  # bytes; changes are reported in units of so many


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    if request["fault"]:
        globals()[request["fault"]]()
    llm = make_llm(
        request["model"],
        platform="cpu",
        speculative_config=request["speculative_config"],
        seed=0,
        **request["engine"],
    )
    runner = model_runner(llm)
    answer = {"norms": norms(runner), "context_norms": context_norms(runner)}
    if request["prompts"]:
        answer |= {
            "parts": parts(runner),
            "blocks": runner.kv_cache_config.num_blocks,
            "block_sizes": list(runner.block_tables.block_sizes),
            "stored": stored(runner),
            "run": run(llm, runner, request["prompts"], request["max_tokens"]),
        }
    Path(answer_path).write_text(json.dumps(answer))


def padding_points_at_the_null_block() -> None:
    """Context rows that are padding get the first slot of block 0."""
    packages.hide_mismatched()
    from vllm_ascend_spec.engine import cpu

    cpu.enable()
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    speculator.PAD_SLOT_ID = 0


# -- the cache ----------------------------------------------------------------------------------


def bound(runner: Any) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of every layer that has a cache."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    return {
        name: cache if isinstance(cache, tuple) else (cache,)
        for name, cache in caches.items()
        if cache is not None
    }


def pool(runner: Any) -> Tensor:
    """uint8 [bytes]: the storage that all layers share."""
    storages = {t.untyped_storage().data_ptr(): t for ts in bound(runner).values() for t in ts}
    assert len(storages) == 1, "layers no longer share one allocation: look at this test anew"
    return torch.empty(0, dtype=torch.uint8).set_(next(iter(storages.values())).untyped_storage())


def parts(runner: Any) -> list[dict[str, Any]]:
    """Where each bound tensor lies in the pool; `shape` and `strides` (bytes) as torch has them."""
    start = pool(runner).data_ptr()
    groups = enumerate(runner.kv_cache_config.kv_cache_groups)
    group_of = {name: index for index, group in groups for name in group.layer_names}
    return [
        {
            "layer": name,
            "group": group_of[name],
            "begin": tensor.data_ptr() - start,
            "shape": list(tensor.shape),
            "strides": [stride * tensor.itemsize for stride in tensor.stride()],
            "itemsize": tensor.itemsize,
        }
        for name, tensors in bound(runner).items()
        for tensor in tensors
    ]


def changed(memory: Tensor) -> list[int]:
    """Units of the pool that no longer hold sentinels alone."""
    return (memory != SENTINEL).view(-1, UNIT).any(dim=1).nonzero().flatten().tolist()


def stored(runner: Any) -> list[dict[str, Any]]:
    """Each attention layer stores one token in blocks 1 to 4, offset 0, and one row of padding."""
    memory, found = pool(runner), []
    layers = runner.vllm_config.compilation_config.static_forward_context
    for part in parts(runner):
        layer = layers[part["layer"]]
        if not hasattr(layer, "impl"):
            continue
        size = runner.block_tables.block_sizes[part["group"]]
        for block in range(1, 5):
            memory.fill_(SENTINEL)
            slots = torch.tensor([block * size, -1])
            row = torch.ones(2, layer.num_kv_heads, layer.head_size, dtype=torch.bfloat16)
            layer.impl.do_kv_cache_update(layer, row, row, layer.kv_cache, slots)
            found.append({"layer": part["layer"], "block": block, "changed": changed(memory)})
    return found


def run(llm: Any, runner: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Answer the prompts on a pool of sentinels; which blocks were given out, what was written."""
    from vllm import SamplingParams, TokensPrompt

    owned: list[set[int]] = [set() for _ in runner.kv_cache_config.kv_cache_groups]
    padding = spy(runner, owned)
    memory = pool(runner).fill_(SENTINEL)
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return {
        "owned": [sorted(blocks - {0}) for blocks in owned],
        "changed": changed(memory),
        "padding_rows": sum(padding),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def spy(runner: Any, owned: list[set[int]]) -> list[int]:
    """Note blocks as requests get them, and count context rows that are padding."""
    append, padding = runner.block_tables.append_block_ids, []

    def noted(request: int, blocks: Any, overwrite: bool) -> None:
        for group, ids in zip(owned, blocks, strict=True):
            group.update(ids)
        append(request, blocks, overwrite)

    runner.block_tables.append_block_ids = noted
    model = runner.speculator.model
    store = model.precompute_and_store_context_kv

    def counted(states: Any, positions: Any, slots: Any = None) -> None:
        for group in slots if isinstance(slots, list) else [slots]:
            padding.append(0 if group is None else int((group == -1).sum()))
        store(states, positions, slots)

    model.precompute_and_store_context_kv = counted
    return padding


# -- norms --------------------------------------------------------------------------------------


def norms(runner: Any) -> list[dict[str, Any]]:
    """What each norm of target and drafter makes of 1, 2, 3, 4, repeated, in float32.

    `made`: float32 [2, 4], alone and with a residual of zeros where the norm takes one; `spread`:
    how far the repetitions lie apart.
    """
    models = {"target": runner.model, "drafter": getattr(runner.speculator, "model", None)}
    found = []
    for owner, model in models.items():
        for name, module in () if model is None else model.named_modules():
            if "RMSNorm" not in type(module).__name__:
                continue
            made = torch.stack(_made_by(module)).view(2, -1, 4)
            found.append(
                {
                    "owner": owner,
                    "name": name,
                    "dtype": str(module.weight.dtype),
                    "made": made[:, 0].tolist(),
                    "spread": float((made - made[:, :1]).abs().max()),
                }
            )
    return found


def _made_by(module: Any) -> list[Tensor]:
    x = torch.arange(1, 5, dtype=torch.float32).repeat(1, module.weight.numel() // 4)
    if "Gated" in type(module).__name__:
        # A gate of 50 is 50 after SiLU, to float32's last bit.
        return [module(x, torch.full_like(x, 50.0)) / 50.0] * 2
    return [module(x.clone()), module(x.clone(), torch.zeros_like(x))[0]]


def context_norms(runner: Any) -> list[list[float]]:
    """Norm weights that a block drafter keeps once more, for storing its context."""
    inner = getattr(getattr(runner.speculator, "model", None), "model", None)
    kept = (getattr(inner, name, None) for name in ("_hidden_norm_weight", "_k_norm_weights"))
    return [weight.float().flatten().tolist() for weight in kept if weight is not None]


if __name__ == "__main__":
    main(*sys.argv[1:])
