"""Pointwise functions whose bits do not depend on where in a buffer an element stands."""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), any shape."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), any shape."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), any shape; without overflow for large x."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows that hold gate and up side by side: [T, 2 I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
