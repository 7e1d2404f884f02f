"""Groups of layers with blocks of different sizes share one pool: who may touch which bytes.

Cause of public reports (vllm#41657, vllm-ascend#16779): equal bytes a page were taken as enough to
share storage. Here a hybrid target (states, full attention) drafts with DFlash layers of full and
sliding attention that have half the KV heads, so that blocks hold 1024, 256 and 512 tokens. Where
pages lie is read from the tensors that vLLM bound to its layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINE
from harness import TIMEOUT_S
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from vllm_ascend_spec.zoo import Zoo

LIMIT = 1024  # max_model_len
# Long enough that blocks leave the sliding window, and that a draft block passes the limit.
LENGTHS = (700, LIMIT - 14)
UNIT = 1024  # bytes, of `inspect_case.py`


@dataclass(frozen=True)
class Part:
    """Bytes of one tensor of one layer in one block; `page` is what a page may not leave."""

    layer: str
    group: int
    block: int
    begin: int
    end: int
    page: tuple[int, int]


def parts(found: dict[str, Any]) -> Iterator[Part]:
    """Every tensor of every layer, block by block. A block may consist of several kernel blocks."""
    pages: dict[str, int] = {}
    for tensor in found["parts"]:
        shape, strides = tensor["shape"], tensor["strides"]
        per_block = shape[0] // found["blocks"]
        stride = strides[0] * per_block
        first = pages.setdefault(tensor["layer"], tensor["begin"])
        reach = [(n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True)]
        size = sum(reach) + tensor["itemsize"] + (per_block - 1) * strides[0]
        for block in range(found["blocks"]):
            begin, page = tensor["begin"] + block * stride, first + block * stride
            yield Part(
                tensor["layer"],
                tensor["group"],
                block,
                begin,
                begin + size,
                (page, page + stride),
            )


def collisions(laid_out: list[Part]) -> list[tuple[Part, Part]]:
    """Parts that share bytes though both may be in use: a block belongs to one group at a time."""
    found, open_parts = [], list[Part]()
    for part in sorted(laid_out, key=lambda p: p.begin):
        open_parts = [other for other in open_parts if other.end > part.begin]
        found += [
            (other, part)
            for other in open_parts
            if other.block != part.block or other.group == part.group
        ]
        open_parts.append(part)
    return found


def outside(laid_out: list[Part]) -> list[Part]:
    return [p for p in laid_out if not p.page[0] <= p.begin < p.end <= p.page[1]]


def in_units(ranges: list[tuple[int, int]]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin // UNIT, -(-end // UNIT))}


# -- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's DFlash drafter with one KV head and a layer of sliding attention."""
    source, made = zoo.drafter("hybrid", "dflash"), tmp_path_factory.mktemp("mixed")
    assert source is not None
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    if config["num_hidden_layers"] == 1:
        first = {k: v.clone() for k, v in weights.items() if k.startswith("layers.0.")}
        weights |= {k.replace("layers.0.", "layers.1."): v for k, v in first.items()}
    for name, value in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = value[: config["head_dim"]].contiguous()
    changes = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 64,
    }
    (made / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, made / "model.safetensors")
    return made


Inspect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def inspect(
    zoo: Zoo,
    drafter: Path,
    prompts: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Inspect:
    """`inspect(gdn_state, fault)`: what `inspect_case.py` found, once for each engine."""
    model = zoo.target("hybrid")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    short = [p.get("ids") or tokenizer.encode(p["text"]).ids for p in prompts[:4]]
    asked = short[:3] + [(ids * LIMIT)[:n] for ids, n in zip(short, LENGTHS, strict=False)]
    speculative = zoo.speculative_config("hybrid", "dflash", adaptive=True)
    assert speculative is not None
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def inspect(gdn_state: str, fault: str | None = None, **engine: Any) -> dict[str, Any]:
        key = (gdn_state, fault, *sorted(engine.items()))
        if key not in known:
            options = {"gdn_state": gdn_state, "max_draft_rows": 6}  # drafts are trimmed
            settings = {
                "max_model_len": LIMIT,
                "max_num_batched_tokens": 256,
                "num_gpu_blocks_override": 96,
                "additional_config": {"ascend_spec": options},
            }
            request = {
                "model": str(model),
                "speculative_config": speculative | {"model": str(drafter)},
                "engine": ENGINE | settings | engine,
                "prompts": asked,
                "max_tokens": 24,
                "fault": fault,
            }
            known[key] = inspected(request, tmp_path_factory.mktemp("inspected"))
        return known[key]

    return inspect


def inspected(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("inspect_case.py")
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, str(script), "request.json", "answer.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache")},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "answer.json").read_text())


LAYOUTS = pytest.mark.parametrize("gdn_state", ["native", "replay"])


@LAYOUTS
def test_pages_of_distinct_blocks_share_no_byte(gdn_state: str, inspect: Inspect):
    found = inspect(gdn_state)
    sizes = {found["block_sizes"][part["group"]] for part in found["parts"]}
    assert len(sizes) == 3, "groups of equal block sizes show nothing"
    laid_out = list(parts(found))
    overlaid = {p.group for p in laid_out if p.page == laid_out[0].page}
    assert len(overlaid) > 2, "groups that share no storage show nothing"
    assert collisions(laid_out) == [] and outside(laid_out) == []
    tensors = [p for p in laid_out if p.layer == "model.layers.0.linear_attn" and p.block == 1]
    assert len(tensors) == {"native": 2, "replay": 6}[gdn_state]
    assert all(a.end <= b.begin for a, b in pairwise(tensors))


def test_rings_at_another_place_would_be_seen(inspect: Inspect):
    laid_out = list(parts(inspect("replay")))
    page = laid_out[0].page[1] - laid_out[0].page[0]
    rings = [p for p in laid_out if p.begin > p.page[0] and p.end - p.begin < page // 4]
    assert rings
    for by in (-page // 4, page // 4, page // 2):
        moved = {p: replace(p, begin=p.begin + by, end=p.end + by) for p in rings}
        shifted = [moved.get(p, p) for p in laid_out]
        assert collisions(shifted)
        assert by < 0 or outside(shifted)


@LAYOUTS
def test_a_slot_lies_in_its_own_block(gdn_state: str, inspect: Inspect):
    """2 * 256 and 1 * 512 are one slot in two groups, and not one place."""
    found = inspect(gdn_state)
    laid_out = list(parts(found))
    attention = {s["layer"] for s in found["stored"]}
    assert len(attention) >= 3  # the target's, and the drafter's two
    for layer, block in product(attention, range(1, 5)):
        (written,) = (
            s["changed"] for s in found["stored"] if (s["layer"], s["block"]) == (layer, block)
        )
        own = [p.page for p in laid_out if (p.layer, p.block) == (layer, block)]
        assert written and set(written) <= in_units(own), (layer, block)


# With prefix caching, prompts are cut at blocks' ends; a step must hold a block and a draft.
CACHING = {"enable_prefix_caching": True, "max_num_batched_tokens": LIMIT}


@pytest.mark.parametrize(
    ("gdn_state", "engine"),
    [
        ("native", {}),
        ("replay", {}),
        ("replay", CACHING),
        pytest.param("native", CACHING, marks=pytest.mark.thorough),
    ],
    ids=["native", "replay", "replay-caching", "native-caching"],
)
def test_requests_write_to_blocks_of_their_own_alone(
    gdn_state: str, engine: dict[str, Any], inspect: Inspect
):
    """Neither the null block nor a block that nobody got, with padding and trimmed rows."""
    found = inspect(gdn_state, **engine)
    ran, laid_out = found["run"], list(parts(found))
    assert ran["padding_rows"] > 50
    assert [len(tokens) for tokens in ran["tokens"]] == [24, 24, 24, 24, 14]
    written = set(ran["changed"])
    for group, owned in enumerate(ran["owned"]):
        own = [p.page for p in laid_out if p.group == group and p.block in owned]
        assert owned and written & in_units(own)
    null = in_units([p.page for p in laid_out if p.block == 0])
    given = in_units([p.page for p in laid_out if p.block in ran["owned"][p.group]])
    assert not written & null
    assert written <= given


def test_padding_that_points_at_the_null_block_is_noticed(inspect: Inspect):
    found = inspect("replay", "padding_points_at_the_null_block")
    null = in_units([p.page for p in parts(found) if p.block == 0])
    assert set(found["run"]["changed"]) & null
