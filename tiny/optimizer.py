"""Muon for the matrices of the layers, fused AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
MATRIX_DECAY = 0.05  # bounds the weights, so that rounding to BF16 does no harm


def orthogonal(x: Tensor) -> Tensor:
    """Nearest (semi-)orthogonal matrices of x [N, rows, columns], by five steps of a quintic Newton-Schulz iteration
    (Jordan et al., Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x.bfloat16() if wide else x.bfloat16().mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()


class Muon:
    """Momentum, orthogonalised per matrix, scaled to the root mean square of an Adam step (Liu et al., 2025)."""

    def __init__(self, parameters: list[Tensor]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(shapes.values())
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonal(gradients.lerp(momentum, MOMENTUM)) * (0.2 * max(group[0].shape) ** 0.5)
            torch._foreach_mul_(group, 1 - rate * MATRIX_DECAY)
            torch._foreach_add_(group, list(updates.unbind()), alpha=-rate)


class Optimizer:
    """Both optimizers over the parameters that require a gradient; ``step(rate)`` sets the rate of the step."""

    def __init__(self, network: nn.Module) -> None:
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                small = parameter.dim() != 2 or "in_proj_a" in name or "in_proj_b" in name
                (others if small or name in ("embed_tokens.weight", "lm_head.weight") else matrices).append(parameter)
        self.parameters = matrices + others
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01, fused=others[0].is_cuda)

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(rate)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
