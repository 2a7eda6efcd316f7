"""Matrix products and the embedding gather."""

import torch
from torch import Tensor

FLOATS_PER_LINE = 16  # 64 bytes: the alignment torch gives every new tensor


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N]; row t has the same bits for every T.

    One matrix-vector product a row, from a row that starts on a cache line: BLAS may sum in another order for another
    number of rows or another alignment.
    """
    rows = x.clone(memory_format=torch.contiguous_format)
    if x.shape[0] == 1:
        return torch.mv(weight, rows[0])[None]
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    aligned = x.shape[1] % FLOATS_PER_LINE == 0
    for index, row in enumerate(rows.unbind(0)):
        out[index] = torch.mv(weight, row if aligned else row.clone())
    return out


def linear_block(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N] as one product; the bits of a row may depend on T."""
    return torch.nn.functional.linear(x, weight)


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, H] for tokens int64 [T] -> [T, H]."""
    return table.index_select(0, tokens)
