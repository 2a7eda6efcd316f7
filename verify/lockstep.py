"""Joining the ranks while they are scanned: which pieces of which rank follow one another in the whole tensor.

All ranks' files are read in step, each from front to back, and the whole tensor's digest grows as its bytes come by.
That needs ranks that keep the whole's layout and are cut between its cells (elements, or tiles); a tensor for which
that does not hold has no plan here, and is joined word by word afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from ..checkpoint.container import ITEMSIZE, TensorEntry
from ..checkpoint.layouts import ROWS, layout_named
from ..checkpoint.manifest import TensorRecord
from ..checkpoint.stream import LARGEST, PIECE

Take = Callable[[int], np.ndarray]  # the next bytes of one rank's tensor, uint8


@dataclass(frozen=True)
class Segment:
    """`cells` of the whole along the axis that the same ranks, `holders`, have; in order there and in each rank."""

    cells: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class JoinPlan:
    """A whole tensor as a grid of cells [rows, columns, `cell_bytes`], cut along `axis` into `segments`."""

    rows: int
    columns: int
    cell_bytes: int
    axis: int
    segments: tuple[Segment, ...]

    def digest(self, takes: Sequence[Take]) -> str | None:
        """Take every rank's tensor to its end; the xxh3-128 of the whole, None if two holders differ."""
        whole = xxhash.xxh3_128()
        join = self._stacked if self.axis == 0 else self._side_by_side
        return whole.hexdigest() if join(takes, whole) else None

    def _stacked(self, takes: Sequence[Take], whole: xxhash.xxh3_128) -> bool:
        alike = True
        for segment in self.segments:
            left = segment.cells * self.columns * self.cell_bytes
            while left:
                first, *others = [takes[rank](min(left, PIECE)) for rank in segment.holders]
                alike &= all(np.array_equal(first, other) for other in others)
                whole.update(first.data)
                left -= len(first)
        return alike

    def _side_by_side(self, takes: Sequence[Take], whole: xxhash.xxh3_128) -> bool:
        held = self._held(len(takes))
        band = max(1, PIECE // (self.columns * self.cell_bytes))
        alike = True
        for first in range(0, self.rows, band):
            rows = min(band, self.rows - first)
            mine = [take(rows * n * self.cell_bytes).reshape(rows, -1) for take, n in zip(takes, held, strict=True)]
            joined = np.empty((rows, self.columns * self.cell_bytes), np.uint8)
            at, reached = 0, [0] * len(takes)
            for segment in self.segments:
                width = segment.cells * self.cell_bytes
                for rank in segment.holders:
                    piece = mine[rank][:, reached[rank] : reached[rank] + width]
                    reached[rank] += width
                    if rank == segment.holders[0]:
                        joined[:, at : at + width] = piece
                    else:
                        alike &= np.array_equal(joined[:, at : at + width], piece)
                at += width
            whole.update(joined.data)
        return alike

    def _held(self, ranks: int) -> list[int]:
        """Cells along the axis that each rank has."""
        return [sum(segment.cells for segment in self.segments if rank in segment.holders) for rank in range(ranks)]


def join_plan(
    records: Sequence[TensorRecord], entries: Sequence[TensorEntry], whole_shape: tuple[int, ...]
) -> JoinPlan | None:
    """The plan for one tensor of all ranks, from their records and headers; None if it cannot be joined in step.

    `whole_shape` is the canonical shape that the family demands.
    """
    splits = [record.split for record in records]
    axes = {None if split is None else split.axis for split in splits}
    axis = next(iter(axes))
    if len(axes) != 1 or axis is None or not 0 <= axis < min(2, len(whole_shape)):
        return None
    dtype, layout = records[0].dtype, records[0].layout
    for record, entry in zip(records, entries, strict=True):
        assert record.split is not None  # one axis, and it is not None
        if (record.dtype, record.layout, record.split.whole.layout) != (dtype, layout, layout):
            return None
        if (entry.dtype, list(entry.shape)) != (dtype, record.shape):
            return None
    rows, columns, *inner = (*whole_shape, 1, 1)[: max(2, len(whole_shape))]
    cell_bytes = ITEMSIZE[dtype]
    for extent in inner:
        cell_bytes *= extent
    steps, tile = (1, 1), layout_named(layout)
    if tile is not None:
        if len(whole_shape) != 2 or not tile.fits(rows, columns * cell_bytes):
            return None
        steps = (ROWS, tile.bytes_per_group // cell_bytes)
        rows, columns, cell_bytes = rows // ROWS, columns // steps[1], ROWS * tile.bytes_per_group
    if not columns * cell_bytes:
        return None
    segments = _segments([s.ranges for s in splits if s is not None], steps[axis], (rows, columns)[axis])
    if segments is None or (axis == 1 and columns * cell_bytes > LARGEST):
        return None
    plan = JoinPlan(rows, columns, cell_bytes, axis, segments)
    across = (columns, rows)[axis] * cell_bytes
    if [n * across for n in plan._held(len(records))] != [entry.nbytes for entry in entries]:
        return None
    return plan


def _segments(held: list[list[tuple[int, int]]], step: int, extent: int) -> tuple[Segment, ...] | None:
    """The axis in segments of cells of `step` elements; None if ranges are not in order, cut a cell or leave a gap."""
    for ranges in held:
        edges = [edge for pair in ranges for edge in pair]
        if edges != sorted(edges) or any(start >= stop or start % step or stop % step for start, stop in ranges):
            return None
    edges = sorted({edge for ranges in held for pair in ranges for edge in pair})
    if not edges or (edges[0], edges[-1]) != (0, extent * step):
        return None
    found = []
    for start, stop in pairwise(edges):
        holders = tuple(
            rank for rank, ranges in enumerate(held) if any(low <= start and stop <= high for low, high in ranges)
        )
        if not holders:
            return None
        found.append(Segment((stop - start) // step, holders))
    return tuple(found)
