"""One rank's weights on a card: matrices in the tiles that the kernels read, everything small in float32.

Nothing is concatenated: `kernels.linear.linears` and `swiglu` take several matrices in one launch. `Weight` is any of the
encodings of `kernels.weights`, matrix by matrix as the recipe chose. All tensors of a `CudaWeights` are on one device,
which may be the CPU: there the operations' torch references run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from ....kernels.delta import DeltaWeights
from ....kernels.weights import Weight
from ....model.config import ModelConfig
from ..vision import VisionWeights
from ..weights import Sizes


@dataclass(frozen=True)
class CudaAttention:
    """inputs: q (query and gate interleaved by head), k, v, each [rows, hidden]; norms float32 [head dim].

    `output` [hidden, query heads * head dim]: its product is summed over the ranks.
    """

    inputs: tuple[Weight, Weight, Weight]
    query_norm: Tensor
    key_norm: Tensor
    output: Weight


@dataclass(frozen=True)
class CudaDelta:
    """inputs: qkv, z, b, a, each [rows, hidden]; norm float32 [value dim].

    `output` [hidden, value heads * value dim]: its product is summed over the ranks.
    """

    inputs: tuple[Weight, Weight, Weight, Weight]
    delta: DeltaWeights
    norm: Tensor
    output: Weight


@dataclass(frozen=True)
class CudaLayer:
    """`index` counts the layers of the same kind; norms float32 [hidden]; gate, up [rows, hidden]; down [hidden, rows].

    The product of `down` is summed over the ranks.
    """

    index: int
    input_norm: Tensor
    mixer: CudaAttention | CudaDelta
    post_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class CudaMtp:
    """The draft layer: fc [hidden, 2 hidden] joins the normalised embedding (first half) and hidden state (second half)."""

    fc: Weight
    embedding_norm: Tensor
    hidden_norm: Tensor
    layer: CudaLayer
    norm: Tensor


@dataclass(frozen=True)
class CudaDraftHead:
    """Rows of the head for the most frequent tokens, or this rank's share of them (`cut`).

    weight [rows, hidden]; ids int32 [rows], the token of each row.
    """

    weight: Weight
    ids: Tensor
    cut: bool


@dataclass(frozen=True)
class CudaWeights:
    """Everything of the model on one rank.

    embed      bfloat16, float16 or float32 [vocabulary, hidden], as stored
    head       [rows, hidden], with `head_cut` this rank's share of the vocabulary
    vision     bfloat16, float16 or float32 as stored; widened where it is used
    nbytes     bytes that all of it takes on the device
    """

    config: ModelConfig
    tp_size: int
    tp_rank: int
    sizes: Sizes
    embed: Tensor
    layers: list[CudaLayer]
    norm: Tensor
    head: Weight
    head_cut: bool
    mtp: CudaMtp | None
    draft_head: CudaDraftHead | None
    vision: VisionWeights | None
    nbytes: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer: `full_attention` or `linear_attention`."""
        return self.config.text.layer_types

    @property
    def device(self) -> torch.device:
        return self.embed.device


def tensors_of(part: object) -> Iterator[Tensor]:
    """Every tensor of a `CudaWeights` or of a part of it, in the order of the fields."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_of(item)
    elif is_dataclass(part) and not isinstance(part, ModelConfig | Sizes):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))
