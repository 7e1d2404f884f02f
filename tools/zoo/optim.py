"""Optimiser of the targets: Muon for matrices, Adam for the rest, all capturable in a graph.

Muon (Jordan et al., 2024) orthogonalises the momentum of each weight matrix by a Newton-Schulz
iteration. Matrices of one shape are stacked, so a step is a few batched products. No step reads a
value back from the device, so the whole training step can be a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix of [N, rows, columns] towards one."""
    a, b, c = _NS_COEFFICIENTS
    x = matrices
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.transpose(-1, -2)


class MuonAdam:
    """Muon on the 2-D weights of the layers, Adam on embeddings, head, norms and gates.

    `lr` is a 0-d tensor on the device: the schedule fills it in place. `adam_scale` multiplies it
    for the Adam group.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        use_muon: bool,
        adam_scale: float,
        weight_decay: float = 0.01,
    ) -> None:
        named = list(model.named_parameters())
        self.params = [p for _, p in named]
        self.lr = torch.zeros((), device=device)
        self.weight_decay = weight_decay
        self.stacks: dict[torch.Size, list[nn.Parameter]] = {}
        adam: list[nn.Parameter] = []
        for name, p in named:
            if use_muon and p.ndim == 2 and "layers." in name and min(p.shape) >= 16:
                self.stacks.setdefault(p.shape, []).append(p)
            else:
                adam.append(p)
        self.momentum = {
            shape: torch.zeros(len(ps), *shape, device=device) for shape, ps in self.stacks.items()
        }
        self.adam_scale = adam_scale
        self.adam_lr = torch.zeros((), device=device)
        fused = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            adam, lr=self.adam_lr, betas=(0.9, 0.98), eps=1e-10, weight_decay=weight_decay,
            fused=fused, capturable=fused, foreach=None if fused else False,
        )  # fmt: skip

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps (host side, outside a graph)."""
        self.lr.fill_(lr)
        self.adam_lr.fill_(lr * self.adam_scale)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients at hand and update all weights."""
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for shape, params in self.stacks.items():
            grad = torch.stack([p.grad.float() for p in params if p.grad is not None])
            momentum = self.momentum[shape]
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95))
            update = update * max(1.0, shape[0] / shape[1]) ** 0.5
            weights = torch.stack([p.detach() for p in params])
            weights = weights * (1 - self.lr * self.weight_decay) - self.lr * update
            for p, w in zip(params, weights.unbind(), strict=True):
                p.copy_(w)
        self.adam.step()
