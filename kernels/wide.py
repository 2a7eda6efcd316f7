"""Linears of 25 and more tokens in one pass over the weights (csrc/wide.cuh): how they are cut, and their launches.

Each tile of weights is decoded once for up to 64 tokens; sums are float32 in a fixed order. A token's bits follow from its row
of x, the matrices of the launch, the number of token blocks (T over the width, rounded up) and the card's multiprocessors;
neither from the other tokens nor from its own place among them, and they are the same in every run.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, module
from .task import task
from .tuning import multiprocessors
from .weights import BAND, GROUP, Weight

SOURCE = "linear_wide.cu"
THREADS = 256
WIDTHS = {"nvfp4": (32, 48, 64), "fp8": (32, 48, 64), "fp8_blocks": (32,), "half": (32,)}  # tokens of a block, compiled
TILE_BANDS = 8  # of a block
TILE_ROWS = TILE_BANDS * BAND
SLOTS = 2  # cut tiles that a block may have a part of
_GROUPS, _STEP_TILES = 2, 4  # of a block's warps; tiles of a step along K
_STEP_BYTES = 2 * _STEP_TILES * GROUP  # of a token
_BAND_STEP_BYTES = {
    "nvfp4": 4 * 288,
    "fp8": 4 * 544,
    "fp8_blocks": 4 * 544,
    "half": 4 * 1056,
}  # with the banks' padding
_STAGES = {"nvfp4": 4, "fp8": 3, "fp8_blocks": 3, "half": 2}
_SMALL = (86, 89, 120, 121)  # compute capabilities whose blocks may have 99 KB: two stages
_SMALL_STAGES = 2
_SUM_TOKENS = 8  # of a block of `wide_sum`; every width is a multiple of it
_OUT_BYTES = 8 * 8 * 68 * 4  # sums on their way out, where the stages were


@dataclass(frozen=True)
class Plan:
    """A launch: `token_blocks` of `width` tokens, times `workers` blocks that share the tiles of 256 rows; `cut` of the
    tiles are shared among all workers, whose sums `wide_sum` adds."""

    width: int
    token_blocks: int
    workers: int
    cut: int

    @property
    def partial_elements(self) -> int:
        """float32 of workspace."""
        return self.workers * SLOTS * self.token_blocks * self.width * TILE_ROWS if self.cut else 0


def plan(encoding: str, tokens: int, bands: int, groups: int, processors: int, widest: int = 64) -> Plan:
    """How `bands` bands (gate and up counted apart) of 16 * groups columns are cut for `tokens` tokens.

    The fewest token blocks, then the least width that holds them: weights are decoded once a token block.
    """
    widths = [width for width in WIDTHS[encoding] if width <= widest]
    token_blocks = -(-tokens // widths[-1])
    width = next(width for width in widths if width * token_blocks >= tokens)
    tiles = -(-bands // TILE_BANDS)
    turns = -(-groups // (_GROUPS * _STEP_TILES))
    workers = max(1, min(processors // token_blocks, tiles * turns))
    return Plan(width, token_blocks, workers, tiles % workers)


def shared_bytes(encoding: str, width: int, arch: str) -> int:
    """Dynamic shared memory in bytes of a block of kernel `wide_{encoding}_{width}`, as compiled for `arch`."""
    capability = int(arch.partition("_")[2])
    tokens = width * _STEP_BYTES
    if capability < 80:
        return max(2 * _GROUPS * tokens, _OUT_BYTES)
    stages = _SMALL_STAGES if capability in _SMALL else _STAGES[encoding]
    return max(_GROUPS * stages * (4 * 2 * _BAND_STEP_BYTES[encoding] + tokens), _OUT_BYTES)


def widest(encoding: str, arch: str, limit: int) -> int:
    """The most tokens of a block whose shared memory is within `limit` bytes; 0 if none is."""
    return max((width for width in WIDTHS[encoding] if shared_bytes(encoding, width, arch) <= limit), default=0)


def widest_on(encoding: str, device: torch.device) -> int:
    """As `widest`, for the code that a CUDA device runs. Raises EnvironmentFault if it cannot be had."""
    return widest(encoding, checks.module_on(SOURCE, device).arch, block_limit(device))


@functools.cache
def block_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block of a CUDA device may have."""
    return module.block_shared_bytes(device.index)


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return multiprocessors(device.index)


def multiply(
    x: Tensor,
    weights: Sequence[Weight],
    outs: Sequence[Tensor],
    epilogue: int,
    *,
    overflows: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """x float16 [T, K] times matrices of one encoding, on torch's current stream; arguments as `task` takes them.

    `overflows` int32 [T] gains the number of fp16 outputs of each token that were cut off at +-65504. `workspace`: float32 that
    nothing else uses until the launches have run, by default memory of the call's own. Other arguments are checked by
    kernels/prefill.py.
    """
    encoding, groups = weights[0].encoding, x.shape[1] // GROUP
    bands = sum(weight.words.shape[0] for weight in weights)
    cut = plan(encoding, x.shape[0], bands, groups, processors(x.device), widest_on(encoding, x.device))
    if workspace is None:
        workspace = torch.empty(cut.partial_elements, device=x.device)
    if cut.partial_elements > workspace.numel():
        raise InputError(
            f"{x.shape[0]} tokens need a workspace of {cut.partial_elements} numbers: there are {workspace.numel()}."
        )
    filled = task(x, list(weights), list(outs), epilogue, None, overflows)
    filled.tensors = [x, *outs, *([] if overflows is None else [overflows]), *chain.from_iterable(map(_read, weights))]
    loaded = checks.module_on(SOURCE, x.device)
    loaded.launch(
        f"wide_{encoding}_{cut.width}",
        cut.token_blocks * cut.workers,
        THREADS,
        (filled, workspace, cut.token_blocks),
        shared_bytes(encoding, cut.width, loaded.arch),
    )
    if cut.cut:
        shape = (cut.token_blocks, cut.workers, cut.width)
        grid = (cut.cut, -(-x.shape[0] // _SUM_TOKENS))
        loaded.launch("wide_sum", grid, TILE_ROWS, (filled, workspace, *shape))


def _read(weight: Weight) -> list[Tensor]:
    """What a launch reads of a weight."""
    return [part for name in weight.__dataclass_fields__ if isinstance(part := getattr(weight, name), Tensor)]
