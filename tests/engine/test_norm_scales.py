"""Case C37 at the loaders: norms of target and drafters scale as their checkpoints mean it.

Targets of the Qwen3.5 kind store w for a scale of 1 + w, but not in the gated norm of a GDN layer;
drafters of the Qwen3 and Llama kinds store the scale itself (speculators#1098). 0.001 beside 1 is
lost where 1 + w is stored as bfloat16 (lmdeploy#4790).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ENGINE
from safetensors.torch import load_file, save_file
from test_shared_pages import inspected

from vllm_ascend_spec.engine.checkpoint import Checkpoint
from vllm_ascend_spec.zoo import Zoo

SMALL = 0.001  # bfloat16 holds 0.00099945; 1 + that is 1 in bfloat16
THOROUGH = ("mtp", "dflash", "eagle3")
METHODS = ["dspark", *(pytest.param(m, marks=pytest.mark.thorough) for m in THOROUGH)]


def with_norms(source: Path, made: Path, zero_centred: bool) -> Path:
    """A checkpoint whose norms are as in the case: small, zero, or one where the scale is w."""
    made.mkdir()
    weights = load_file(source / "model.safetensors")
    for name in Checkpoint(source, "--model").norms:
        centred = zero_centred and "linear_attn" not in name
        value = 1.0 if not centred else SMALL if "layernorm" in name else 0.0
        weights[name] = torch.full_like(weights[name], value)
    save_file(weights, made / "model.safetensors")
    for path in source.glob("*.json"):
        (made / path.name).write_text(path.read_text())
    return made


@pytest.fixture(scope="module")
def loaded(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`loaded(method)`: what `inspect_case.py` says of the norms of an engine."""
    root = tmp_path_factory.mktemp("norms")
    target = with_norms(zoo.target("hybrid"), root / "hybrid", zero_centred=True)
    known: dict[str, Any] = {}

    def loaded(method: str) -> Any:
        if method not in known:
            speculative = zoo.speculative_config("hybrid", method)
            assert speculative is not None
            if "model" in speculative:
                drafter = with_norms(Path(speculative["model"]), root / method, zero_centred=False)
                speculative |= {"model": str(drafter)}
            case = {
                "model": str(target),
                "speculative_config": speculative,
                "engine": ENGINE,
                "prompts": [],
                "fault": None,
            }
            known[method] = inspected(case, tmp_path_factory.mktemp("loaded"))
        return known[method]

    return loaded


def normalised(scale: float) -> torch.Tensor:
    """float32 [4]: 1, 2, 3, 4 over their root mean square, times the scale."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return x * torch.rsqrt(x.square().mean() + 1e-6) * scale


@pytest.mark.parametrize("method", METHODS)
def test_norms_scale_as_their_checkpoint_means_it(method: str, loaded: Any):
    found = loaded(method)
    small = float(torch.tensor(SMALL).bfloat16())
    kinds: dict[str, int] = {}
    for norm in found["norms"]:
        gated = "linear_attn" in norm["name"]
        centred = (norm["owner"] == "target" or method == "mtp") and not gated
        scale = 1 + small if centred and "layernorm" in norm["name"] else 1.0
        # Plain norms round to bfloat16 before they multiply, as their models were trained.
        within = 2e-6 if centred or gated else 2**-8
        expected = normalised(scale).expand(2, 4)
        made = torch.tensor(norm["made"])
        assert norm["dtype"] == "torch.bfloat16" and norm["spread"] == 0, norm
        assert torch.allclose(made, expected, rtol=within, atol=0), norm
        kind = "gated" if gated else "centred" if centred else "plain"
        kinds[kind] = kinds.get(kind, 0) + 1
    assert kinds.get("gated", 0) >= 2 and kinds["centred"] >= 8
    assert method == "mtp" or kinds["plain"] >= 4
    if method in ("dspark", "dflash"):
        assert len(found["context_norms"]) == 2
    assert all(set(weights) == {1.0} for weights in found["context_norms"])


def test_small_weights_would_be_lost_in_bfloat16():
    """The tolerance above tells 1 + w added in float32 from the sum in bfloat16."""
    small = torch.tensor(SMALL).bfloat16()
    lost = normalised(float((small + 1).bfloat16()))
    assert not torch.allclose(lost, normalised(1 + float(small)), rtol=2e-6, atol=0)
