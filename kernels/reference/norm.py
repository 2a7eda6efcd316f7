"""Normalisations of the family. Weights are used as stored."""

import torch
from torch import Tensor

from .activation import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm on the last axis: x * rsqrt(mean(x^2) + eps) * (1 + weight)."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with the plain weight on the last axis, times silu(gate); x and gate of one shape."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight * silu(gate)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) on the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
