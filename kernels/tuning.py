"""Choices of a card's own, those of the linears from `duovolt kernels tune`. They change speed and no bits, but for those that
choose among ways for many tokens, and for `slices`.

They stand in `tuning.json` beside the compiled kernels, by the name of the card; without them the defaults hold.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ..checkpoint.errors import EnvironmentFault, InputError
from .build import cache_directory, write_atomically

STAGES = {"nvfp4": 2, "fp8": 3, "half": 2}  # of each warp's ring of copies, as in csrc/encodings.cuh
STAGE_BYTES = {
    "nvfp4": 8 * 288,
    "fp8": 4 * 544,
    "half": 4 * 1056,
}  # a turn's tiles with the padding that spreads the banks
HALF_STAGES = {"nvfp4": 3, "fp8": 2}  # likewise where an item is half a band
_HALF_STAGE_BYTES = {"nvfp4": 8 * 160, "fp8": 4 * 288}
MIXED_STAGES = 2  # of fp8 bands in a launch of several encodings
BAND, HALF_BAND = 32, 16  # rows of an item
HALVES = "halves"  # kernels of half a band an item: linear_{encoding}_halves_{T}
DEEP = "deep"  # the same with one stage more in the rings, for fp8 and up to eight tokens: linear_fp8_deep_8
_DEEP_BLOCKS = 3  # a multiprocessor at most: with three and a half the copies were too many for it, and came later
SLICED = (
    "sliced"  # kernels of bands whose chains are slices of K, for more than eight tokens: linear_{encoding}_sliced_{T}
)
_SLICED_CHAINS = 16
# What half a band of nvfp4 costs, of a whole one, by the instructions of a turn; sixteen rows of gate and of up against a band of
# each. Bands of fp8, which waits for bytes, a multiprocessor: below so many halves of them took less time on an H200, where
# launches overlap (docs/kernels/linear.md).
_HALF_COST, _PAIR_COST = 0.58, 0.5
_HALVED_FP8 = 8.0
_HALVED_TOKENS = 8  # of more only gate and up, side by side, were sooner
# Blocks a multiprocessor for gate and up side by side, by padded T: as many as it holds (kBlocks in csrc/linear.cuh). There are
# more items than that, and blocks that begin second would go wherever a slot is free first.
PAIR_BLOCKS = {8: 3, 16: 2, 24: 2}
_WARPS = 8
_OLDEST_RING = 80  # the first architecture with rings and half bands
_RESERVED_BYTES = 1024  # of shared memory, that every block takes besides, on sm_80 and newer
MOST_STAGES = 8
MOST_BLOCKS = 16
WIDE_FROM = 49  # fewer tokens cost the decode linear two passes over the weights, these three
# Off: on an H200 it pays for few matrices; docs/kernels/linear.md, "More tokens", reckons with 256 on a V100.
WIDE_UP_TO = 0
MOST_WIDE = 4096
# Of the next product's weights: half of the second-level cache, at most so many bytes, from where on rounds that overlap gained
# less on an H200 (docs/collectives.md).
ASKED_SHARE, ASKED_BYTES = 0.5, 16_000_000
MOST_ASKED = 256
# Making a matrix takes as long for any number of tokens, its product longer for more: an eighth of an H200's multiprocessors
# was worth its while at 512 tokens.
SPARING_UP_TO = 512
MOST_SPARING = 1 << 16
_SPARED = 8  # one in so many multiprocessors
# Layers of plain weights: with less than one a matrix waits for the product before its own.
AHEAD, MOST_AHEAD = 1.25, 8.0
_AHEAD_FROM = (9, 0)  # compute capability, where it was measured


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How linears and exchanges run on one card.

    `stages`: of the rings of copies on sm_80 and newer, by encoding; `half_stages`: where an item is half a band, with one
    more in `DEEP` ones; `mixed_stages`: of fp8 in a launch of several encodings. `blocks_a_sm`: blocks a multiprocessor that
    share all items of a launch; 0 for a block an item, but `PAIR_BLOCKS` for gate and up side by side. `rows` of an item of
    nvfp4 or fp8 on sm_80 and newer: 32, a band; 16, half of one; 0, whichever `rows_of` expects to end sooner. `ablate`:
    what is left out to see what the rest costs, with wrong results.
    `slices`: matrices whose columns suit it go in slices of K (kernels/slices.py), those whose shape suits it in one pass
    (kernels/one_pass.py; gate and up: kernels/pair_pass.py), where rings, rows and blocks are their own; off, they go as the
    others do, with other bits.
    `asked`: megabytes of the next product's weights that an exchange asks for into the second-level cache; None: half of it, at
    most 16; 0: none.
    `early`: what lets the next launch of a round begin before it has ended, beside what always does (docs/kernels.md).

    `wide_from`, `wide_up_to`: tokens that the wide linear takes (none if the latter is 0); fewer go through the decode linear,
    24 at a time, more through dequantised weights. `overlap_dequantising`: pieces of the latter are made on a stream of
    their own while the vendor's product works on the piece before. `plain_ahead`: a prompt's chunk has the plain weights of
    the next products made beside this one (kernels/plain_ahead.py), in memory for so many layers; 0: in turn; None:
    `AHEAD` from compute capability 9.0 on. Not with `overlap_dequantising`. `sparing_up_to`: of so many
    tokens at most a product leaves an eighth of the multiprocessors to that.
    """

    stages: dict[str, int] = msgspec.field(default_factory=lambda: dict(STAGES))
    blocks_a_sm: int = 0
    ablate: Literal["", "arithmetic", "loads"] = ""
    rows: Literal[0, 16, 32] = 0
    half_stages: dict[str, int] = msgspec.field(default_factory=lambda: dict(HALF_STAGES))
    mixed_stages: int = MIXED_STAGES
    slices: bool = True
    asked: int | None = None
    early: frozenset[Literal["exchange"]] = frozenset()
    wide_from: int = WIDE_FROM
    wide_up_to: int = WIDE_UP_TO
    overlap_dequantising: bool = False
    plain_ahead: float | None = None
    sparing_up_to: int = SPARING_UP_TO

    @property
    def prompts(self) -> str:
        """What of it decides the rounding of a prompt's products: the same on every rank, or they read different prompts."""
        wide = f"wide:{self.wide_from}-{self.wide_up_to}" if self.wide_up_to else "plain"
        return wide + ",beside" * self.overlap_dequantising + ",bands" * (not self.slices)

    def layers_ahead(self, capability: tuple[int, int]) -> float:
        """Layers whose plain weights have room on a card of this compute capability, so that they are made ahead; 0: none."""
        if self.overlap_dequantising:
            return 0.0
        return self.plain_ahead if self.plain_ahead is not None else AHEAD * (capability >= _AHEAD_FROM)

    def multiprocessors_of(self, tokens: int, multiprocessors: int) -> int:
        """That a product of so many tokens takes where the next matrices are made beside it; 0: all. Always in pairs, which
        blocks of the vendor's products are."""
        spared = multiprocessors // _SPARED & ~1
        return multiprocessors - spared if spared and tokens <= self.sparing_up_to else 0

    def __post_init__(self) -> None:
        good = set(self.stages) == set(STAGES) and set(self.half_stages) == set(HALF_STAGES)
        depths = [*self.stages.values(), *self.half_stages.values(), self.mixed_stages]
        if not good or not all(2 <= n <= MOST_STAGES for n in depths) or not 0 <= self.blocks_a_sm <= MOST_BLOCKS:
            raise ValueError(
                f"stages from 2 to {MOST_STAGES} for {', '.join(STAGES)}, half_stages for {', '.join(HALF_STAGES)}; "
                f"blocks_a_sm up to {MOST_BLOCKS}"
            )
        if self.asked is not None and not 0 <= self.asked <= MOST_ASKED:
            raise ValueError(f"asked from 0 to {MOST_ASKED} megabytes")
        if self.wide_from < 1 or not 0 <= self.wide_up_to <= MOST_WIDE:
            raise ValueError(f"wide_from at least 1, wide_up_to from 0 to {MOST_WIDE}")
        if not 0 <= (self.plain_ahead or 0) <= MOST_AHEAD or not 0 <= self.sparing_up_to <= MOST_SPARING:
            raise ValueError(f"plain_ahead from 0 to {MOST_AHEAD}, sparing_up_to from 0 to {MOST_SPARING}")

    @property
    def defines(self) -> tuple[str, ...]:
        """What the source is compiled with, none for the defaults."""
        depths = [(f"{name.upper()}_STAGES", n, STAGES[name]) for name, n in self.stages.items()]
        depths += [(f"{name.upper()}_HALF_STAGES", n, HALF_STAGES[name]) for name, n in self.half_stages.items()]
        depths += [("FP8_MIXED_STAGES", self.mixed_stages, MIXED_STAGES)]
        stages = tuple(f"{name}={n}" for name, n, usual in depths if n != usual)
        return (*stages, f"ABLATE_{self.ablate.upper()}") if self.ablate else stages

    def rows_of(self, kernel: str, items: int, paired: bool, multiprocessors: int, arch: str, tokens: int) -> int:
        """Rows of an item in a launch of `items` bands, or of gate and up (`paired`), for `tokens` tokens, by code for `arch`.

        With `rows` 0: for nvfp4 the multiprocessor with most items ends last, and halves are taken if that is sooner then; for
        fp8 by what was measured.
        """
        if int(arch.partition("_")[2]) < _OLDEST_RING or kernel not in HALF_STAGES:
            return BAND
        if self.rows:
            return self.rows
        if tokens > _HALVED_TOKENS and not paired:
            return BAND
        if kernel == "fp8":
            sooner = not paired and items / multiprocessors < _HALVED_FP8
        else:
            cost = _PAIR_COST if paired else _HALF_COST
            sooner = -(-2 * items // multiprocessors) * cost < -(-items // multiprocessors)
        return HALF_BAND if sooner else BAND

    @staticmethod
    def halves_of(kernel: str, blocks: int, multiprocessors: int, tokens: int) -> str:
        """Which kernel of half bands a launch of so many blocks takes: `HALVES` or `DEEP`."""
        few = blocks <= _DEEP_BLOCKS * multiprocessors
        return DEEP if kernel == "fp8" and tokens <= _HALVED_TOKENS and few else HALVES

    def blocks(self, items: int, multiprocessors: int, resident: int = 0) -> int:
        """Blocks of a launch of `items` items; `resident`: that a multiprocessor should hold if the choice leaves it open."""
        each = self.blocks_a_sm or resident
        return min(items, each * multiprocessors) if each else items

    def shared_bytes(self, kernel: str, tokens: int, arch: str) -> int:
        """Dynamic shared memory in bytes of a block of kernel `linear_{kernel}_{tokens}`, as compiled for `arch`."""
        encoding, _, kind = kernel.partition("_")
        held = HALF_BAND if kind in (HALVES, DEEP) else BAND
        sums = (_WARPS + 1) * tokens * (held + 1) * 4  # with the padding of a row
        if int(arch.partition("_")[2]) < _OLDEST_RING:
            return sums
        if kind == SLICED:
            sums = (_SLICED_CHAINS + 1) * tokens * (held + 1) * 4
            return sums + _WARPS * self.stages[encoding] * STAGE_BYTES[encoding]
        if kind in (HALVES, DEEP):
            return sums + _WARPS * (self.half_stages[encoding] + (kind == DEEP)) * _HALF_STAGE_BYTES[encoding]
        stages = self.stages | {"fp8": self.mixed_stages} if encoding == "any" else self.stages
        names = list(STAGES) if encoding == "any" else [encoding]
        return sums + max(_WARPS * stages[name] * STAGE_BYTES[name] for name in names)


def spread(shared_bytes: int, blocks: int, multiprocessors: int, most: int, in_all: int) -> int:
    """Dynamic shared memory of a block that lets a multiprocessor hold no more blocks of a launch than an even share.

    A launch that begins before the one before has ended finds room wherever that one ends first, and would pile its blocks up
    there: three on a multiprocessor, and none on another. `most`: bytes that a block may have; `in_all`: a multiprocessor.
    """
    share = -(-blocks // multiprocessors)
    wanted = in_all // (share + 1) - _RESERVED_BYTES + 1  # of which one more does not fit
    return max(shared_bytes, min(wanted, most))


_override: ContextVar[Choice | None] = ContextVar("tuning_override", default=None)


def path() -> Path:
    """Where choices are stored."""
    return cache_directory() / "tuning.json"


def read() -> dict[str, Choice]:
    """Stored choices by name of card, empty if there are none. Raises InputError for a damaged file."""
    try:
        content = path().read_bytes()
    except (OSError, EnvironmentFault):  # no file, or no place for one
        return {}
    try:
        found = msgspec.json.decode(content, type=dict[str, Choice])
        if any(choice.ablate for choice in found.values()):
            raise ValueError("a choice that leaves work out is for measuring, never to be kept")
        return found
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"{path()}: {error}. Remove it, or run `duovolt kernels tune` again.") from None


def store(card: str, chosen: Choice) -> Path:
    """Keep a card's choice; the file. A damaged one is begun anew. Raises EnvironmentFault if it cannot be written."""
    try:
        known = read()
    except InputError:
        known = {}
    write_atomically(path(), msgspec.json.format(msgspec.json.encode(known | {card: chosen}), indent=1) + b"\n")
    _stored.cache_clear()
    return path()


@contextlib.contextmanager
def using(chosen: Choice) -> Iterator[None]:
    """Within it, every device runs with this choice: for measuring."""
    token = _override.set(chosen)
    try:
        yield
    finally:
        _override.reset(token)


def choice(device: int) -> Choice:
    """The choice for a CUDA device; the stored one is read once a process."""
    return _override.get() or _stored(device)


def choice_for(card: str) -> Choice:
    """The stored choice for a card of this name, or the defaults. Raises InputError for a damaged file."""
    return _override.get() or read().get(card, Choice())


def choice_on(device: torch.device) -> Choice:
    """The same for any device; the defaults for one that is not CUDA's."""
    if device.type != "cuda":
        return _override.get() or Choice()
    return choice(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _stored(device: int) -> Choice:
    return read().get(torch.cuda.get_device_name(device), Choice())


def asked_bytes(device: torch.device) -> int:
    """Of the next product's weights that an exchange asks for."""
    chosen = choice_on(device).asked
    if chosen is not None:
        return chosen * 1_000_000
    if device.type != "cuda":
        return 0
    return _cached_share(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cached_share(device: int) -> int:
    return min(ASKED_BYTES, int(ASKED_SHARE * torch.cuda.get_device_properties(device).L2_cache_size))


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
