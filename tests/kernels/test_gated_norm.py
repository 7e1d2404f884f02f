"""The norm after the recurrence, against its oracle, and where it refuses."""

from __future__ import annotations

import pytest
import torch

from kernels.gdn_verify import gated_norm, gated_norm_naive

HEADS, DIM, EPS = 4, 16, 1e-6


def rows(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of the recurrence, gates as a view of the packed projection)."""
    torch.manual_seed(count)
    packed = torch.randn(count, 3 * HEADS * DIM, dtype=torch.bfloat16)
    x = torch.randn(count, HEADS, DIM, dtype=torch.bfloat16)
    gate = packed.to(device)[:, 2 * HEADS * DIM :].reshape(count, HEADS, DIM)
    return x.to(device), gate


@pytest.mark.parametrize("count", [0, 1, 5, 33])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_equals_the_oracle(
    count: int, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, gate = rows(count, device)
    weight = torch.linspace(0.5, 1.5, DIM).to(dtype).to(device)
    wanted = gated_norm_naive.gated_norm(x.clone(), gate, weight, EPS, activation)
    found = gated_norm.gated_norm(x, gate, weight, EPS, activation)
    assert found is x
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)


def test_the_oracle_is_the_formula_in_float64() -> None:
    x, gate = rows(9, torch.device("cpu"))
    weight = torch.rand(DIM)
    x64, gate64 = x.double(), gate.double()
    normed = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    wanted = normed * gate64 / (1 + (-gate64).exp())
    found = gated_norm_naive.gated_norm(x, gate, weight, EPS)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("package", [gated_norm, gated_norm_naive])
def test_what_does_not_fit_is_named(package: object) -> None:
    x, gate = rows(3, torch.device("cpu"))
    norm, weight = package.gated_norm, torch.ones(DIM)
    with pytest.raises(ValueError, match="activation"):
        norm(x, gate, weight, EPS, "relu")
    with pytest.raises(ValueError, match="weight"):
        norm(x, gate, torch.ones(DIM + 1), EPS)
    with pytest.raises(ValueError, match="within a row"):
        norm(x, gate.transpose(1, 2).contiguous().transpose(1, 2), weight, EPS)
