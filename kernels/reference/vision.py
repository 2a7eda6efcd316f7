"""Operations of the vision tower: one picture at a time, every rank the same ones, so no row-by-row forms are needed.

Weights of 16 bits are widened where they are used: a tower costs the memory of what is stored.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SCORES_BYTES = 256 << 20  # of attention scores at a time, where a backend keeps them
LARGEST_HALF = 65504.0


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis of x [T, H]."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight.float(), bias.float(), eps)


def linear_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]."""
    return torch.nn.functional.linear(x, weight.float(), bias.float())


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), Phi the normal distribution."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def attend_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every patch attends to every patch: float32 [T, H, D] each -> softmax(q k^T / sqrt(D)) v, [T, H, D].

    On a GPU the operands are rounded to fp16 for a fused kernel of torch's, which keeps no scores; elsewhere float32, a few
    queries at a time where there are many, so that memory does not grow with T squared.
    """
    if query.is_cuda:
        return attend_all_half(query, key, value)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    tokens, heads = query.shape[:2]
    step = max(1, SCORES_BYTES // (4 * heads * tokens))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(q[:, :, first : first + step], k, v)
        for first in range(0, tokens, step)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[0].transpose(0, 1)


def attend_all_half(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As `attend_all`, with operands in fp16, sums in FP32.

    Powers of two, which change no bit of a product, bring queries and keys to one size, and values to at most 1: so neither
    end of fp16 is near. What would not fit even then (largest query times largest key above 2^30) becomes the largest number.
    """
    sizes = [torch.frexp(x.abs().amax()).exponent for x in (query, key, value)]
    shift = torch.div(sizes[1] - sizes[0], 2, rounding_mode="floor")
    pad = -query.shape[2] % 8  # fused kernels want multiples of 16 bytes
    operands = [
        torch.nn.functional.pad(torch.ldexp(x, by).clamp(-LARGEST_HALF, LARGEST_HALF).half(), (0, pad))
        for x, by in ((query, shift), (key, -shift), (value, -sizes[2]))
    ]
    q, k, v = (x.transpose(0, 1)[None] for x in operands)
    scale = query.shape[2] ** -0.5
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if query.is_cuda else SDPBackend.MATH
    ):
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return torch.ldexp(attended[0].transpose(0, 1)[..., : query.shape[2]].float(), sizes[2])


def grid_positions(rows: int, columns: int, merge: int, device: torch.device | str = "cpu") -> Tensor:
    """Row and column of each patch, int64 [rows * columns, 2], patches of one merge x merge square side by side."""
    extents = (torch.arange(extent, device=device) for extent in (rows, columns))
    row, column = torch.meshgrid(*extents, indexing="ij")
    shape = (rows // merge, merge, columns // merge, merge)
    return torch.stack([x.reshape(shape).transpose(1, 2).flatten() for x in (row, column)], dim=-1)


def grid_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D / 2] for positions [T, 2]: the row turns the first half of them, the column the second.

    Frequencies are theta^(-2 j / (D / 2)), j in [0, D / 4).
    """
    quarter = head_dim // 4
    frequencies = 1.0 / (theta ** (torch.arange(quarter, dtype=torch.float32, device=positions.device) / quarter))
    angles = (positions[:, :, None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def resample_table(table: Tensor, positions: Tensor, rows: int, columns: int) -> Tensor:
    """Bilinear samples of a square table [S * S, H] at positions [T, 2] of a rows x columns grid -> [T, H].

    The corners of the grid are the corners of the table.
    """
    side = int(table.shape[0] ** 0.5)
    taps, weights = [], []
    for axis, extent in enumerate((rows, columns)):
        at = positions[:, axis].float() * (side - 1) / max(extent - 1, 1)
        low = at.floor()
        taps.append((low.long(), (low.long() + 1).clamp(max=side - 1)))
        weights.append((1 - (at - low), at - low))
    total = torch.zeros(len(positions), table.shape[1], device=table.device)
    for down, down_weight in zip(taps[0], weights[0], strict=True):
        for across, across_weight in zip(taps[1], weights[1], strict=True):
            total += table[down * side + across] * (down_weight * across_weight)[:, None]
    return total
