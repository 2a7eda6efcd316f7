"""Joining raw words from the ranks' own records, band by band."""

from dataclasses import dataclass

import numpy as np

from ..checkpoint.container import NUMPY_DTYPE
from ..checkpoint.encodings import tile_of
from ..checkpoint.encodings.weights import tile_here
from ..checkpoint.errors import CheckFailed
from ..checkpoint.manifest import TensorRecord
from .stage import StageView
from .words import first_difference

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Band:
    """Rows of a whole tensor. `covered[i]`: some rank holds position i of `axis` (0: rows of the band, 1: columns)."""

    words: np.ndarray
    axis: int
    covered: np.ndarray

    def known(self, of: np.ndarray) -> np.ndarray:
        """The covered part of an array of the same shape."""
        if self.covered.all():
            return of
        return of[self.covered] if self.axis == 0 else of[:, self.covered]


class Joined:
    """Whole tensors put together from some ranks; `shapes` are their canonical shapes, as the family demands them."""

    def __init__(self, views: list[StageView], shapes: dict[str, Shape]) -> None:
        self.views, self.shapes = views, shapes

    def axis(self, name: str) -> int | None:
        """The axis along which all ranks say they were cut. Raises CheckFailed if they disagree or it makes no sense."""
        found = {_record(view, name).split.axis for view in self.views}  # type: ignore[union-attr]
        if len(found) != 1:
            raise CheckFailed(f"ranks disagree on the axis of the cut: {sorted(map(str, found))}")
        axis = found.pop()
        if axis is not None and not 0 <= axis < min(2, len(self.shapes[name])):
            raise CheckFailed(f"cut along axis {axis} of {list(self.shapes[name])}")
        return axis

    def dtype(self, name: str) -> np.dtype:
        """The words' numpy type. Raises CheckFailed if the ranks disagree."""
        found = {_record(view, name).dtype for view in self.views}
        if len(found) != 1:
            raise CheckFailed(f"ranks disagree on the dtype: {sorted(found)}")
        return NUMPY_DTYPE[found.pop()]

    def _repeat(self, name: str, axis: int) -> int:
        """How often the ranks repeat each tile scale along the axis, since cuts fall inside tiles; 1 for other parts.

        Raises CheckFailed if the ranks disagree.
        """
        found = set()
        for view in self.views:
            record = _record(view, name)
            whole = tile_of(record.encoding) if record.part == "tile_scale" else None
            here = tile_here(record.encoding, _record(view, record.weight)) if whole is not None else None
            found.add(1 if whole is None or here is None else whole[axis] // here[axis])
        if len(found) != 1:
            raise CheckFailed(f"ranks disagree on the size of tiles: {sorted(found)} scales in place of one")
        return found.pop()

    def _checked_ranges(self, view: StageView, name: str, axis: int, shape: Shape) -> list[tuple[int, int]]:
        """A rank's ranges, if they fit the whole of `shape` and add up to what the rank stores."""
        record, whole = _record(view, name), list(shape)
        assert record.split is not None  # read_manifest refuses a rank's record without one
        ranges = record.split.ranges
        held = sum(stop - start for start, stop in ranges)
        if not all(0 <= start < stop <= whole[axis] for start, stop in ranges):
            raise CheckFailed(f"{view.label}: ranges {ranges} outside {whole} along axis {axis}")
        if [*whole[:axis], held, *whole[axis + 1 :]] != record.canonical_shape:
            raise CheckFailed(f"{view.label}: ranges {ranges} of {whole} do not make {record.canonical_shape}")
        return ranges

    def band(self, name: str, first: int, last: int) -> Band:
        """Rows [first, last) of a whole tensor, as far as these ranks hold them.

        Raises CheckFailed if records and stored shapes contradict one another, or two ranks hold different words for
        the same place.
        """
        shape, axis = self.shapes[name] or (1,), self.axis(name)
        if axis is None:
            return self._replicated(name, first, last)
        repeat = self._repeat(name, axis)
        if repeat == 1:
            return self._joined(name, shape, axis, first, last)
        fine = [*shape[:axis], self._fine_extent(name, axis), *shape[axis + 1 :]]
        if axis == 0:
            first, last = first * repeat, min(last * repeat, fine[0])
        return _collapsed(self._joined(name, tuple(fine), axis, first, last), repeat)

    def _fine_extent(self, name: str, axis: int) -> int:
        """Extent of repeated tile scales along the axis: the furthest that a rank holds."""
        splits = [_record(view, name).split for view in self.views]
        return max(stop for split in splits if split is not None for _, stop in split.ranges)

    def _joined(self, name: str, shape: Shape, axis: int, first: int, last: int) -> Band:
        words = np.zeros((last - first, *shape[1:]), self.dtype(name))
        covered = np.zeros(len(words) if axis == 0 else shape[1], bool)
        for view in self.views:
            offset = 0
            for start, stop in self._checked_ranges(view, name, axis, shape):
                if axis == 0:
                    low, high = max(start, first), min(stop, last)
                    if low < high:
                        piece = view.rows(name, offset + low - start, offset + high - start)
                        _place(words, covered, slice(low - first, high - first), piece, view)
                else:
                    piece = view.rows(name, first, last)[:, offset : offset + stop - start]
                    _place(words.swapaxes(0, 1), covered, slice(start, stop), piece.swapaxes(0, 1), view)
                offset += stop - start
        return Band(words, axis, covered)

    def _replicated(self, name: str, first: int, last: int) -> Band:
        record = _record(self.views[0], name)
        if record.canonical_shape != list(self.shapes[name]):
            raise CheckFailed(
                f"{self.views[0].label}: replicated, but {record.canonical_shape} of {list(self.shapes[name])}"
            )
        words = self.views[0].rows(name, first, last)
        return Band(words, 0, np.ones(len(words), bool))

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows [first, last) complete. Raises CheckFailed as `band` does, or if a place is held by no rank."""
        band = self.band(name, first, last)
        self.require_covered(band, first)
        return band.words

    @staticmethod
    def require_covered(band: Band, first: int) -> None:
        """Raises CheckFailed if a place of a band that starts at row `first` is held by no rank."""
        if not band.covered.all():
            at = int(np.argmin(band.covered)) + (first if band.axis == 0 else 0)
            raise CheckFailed(f"no rank holds position {at} of axis {band.axis}")

    def owner(self, name: str, index: list[int]) -> StageView:
        """The first rank that holds an index of the whole."""
        axis = self.axis(name)
        repeat = 1 if axis is None else self._repeat(name, axis)
        for view in self.views:
            split = _record(view, name).split
            if (
                axis is None
                or split is None
                or any(start <= index[axis] * repeat < stop for start, stop in split.ranges)
            ):
                return view
        return self.views[0]


def _record(view: StageView, name: str) -> TensorRecord:
    record = view.manifest.tensors.get(name)
    if record is None:
        raise CheckFailed(f"{view.label} does not have it")
    return record


def _collapsed(band: Band, repeat: int) -> Band:
    """One scale in place of `repeat` along the band's axis. Raises CheckFailed if they are not the same scale."""
    words = band.words.swapaxes(0, band.axis)
    kept, covered = words[::repeat].copy(), band.covered[::repeat].copy()
    for offset in range(1, repeat):
        more, here = words[offset::repeat], band.covered[offset::repeat]
        known = covered[: len(more)]
        both = known & here
        if (differs := first_difference(more[both], kept[: len(more)][both])) is not None:
            tile = int(np.flatnonzero(both)[differs[0][0]])
            raise CheckFailed(f"a scale repeated within band tile {tile} of axis {band.axis} differs: {differs[1:]}")
        new = here & ~known
        kept[: len(more)][new] = more[new]
        covered[: len(more)] |= here
    return Band(np.ascontiguousarray(kept.swapaxes(0, band.axis)), band.axis, covered)


def _place(words: np.ndarray, covered: np.ndarray, where: slice, piece: np.ndarray, view: StageView) -> None:
    """Put a piece at `where` of the leading axis; what another rank has put there already must be the same."""
    twice = covered[where]
    if twice.any() and (differs := first_difference(piece[twice], words[where][twice])) is not None:
        position = where.start + int(np.flatnonzero(twice)[differs[0][0]])
        raise CheckFailed(
            f"held by several ranks, and {view.label} differs from an earlier one at band position {position}: "
            f"{differs[1]}, elsewhere {differs[2]}"
        )
    words[where] = piece
    covered[where] = True
