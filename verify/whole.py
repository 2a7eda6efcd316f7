"""The ranks joined are the converted directory, word for word."""

from collections.abc import Callable

import numpy as np
import xxhash

from ..checkpoint.errors import CheckFailed, DuovoltError
from ..checkpoint.layouts import layout_named
from .join import Joined
from .ranks import RankSet
from .report import Proof, Report
from .stage import StageView, whole_shapes
from .words import bands_of, first_difference

Advance = Callable[[int], None]
UNREADABLE = (DuovoltError, OSError, ValueError)  # what damaged records and files raise while being read


def prove_joined(ranks: RankSet, converted: StageView | None, report: Report, advance: Advance) -> Joined | None:
    """Join the ranks and compare with the converted directory, or with the digests that their records carry.

    Returns the joined whole if it is complete, for proofs against the source.
    """
    shapes = whole_shapes(converted or ranks.views[0])
    joined = ranks.joined(shapes)
    if converted is not None:
        _compare_words(joined, converted, ranks.complete, report, advance)
    elif ranks.complete:
        _compare_digests(joined, report, advance)
    else:
        report.skip("ranks: joined whole", "needs all ranks, or the converted directory beside them")
    return joined if ranks.complete else None


def _compare_words(joined: Joined, converted: StageView, complete: bool, report: Report, advance: Advance) -> None:
    proof = report.begin("converted -> ranks: words")
    count, nbytes = 0, 0
    for name, shape in joined.shapes.items():
        record = converted.manifest.tensors.get(name)
        if record is None:
            continue
        try:
            for first, last in bands_of(shape, record.dtype):
                whole = converted.rows(name, first, last)
                nbytes += whole.nbytes
                advance(whole.nbytes)
                if _differs(joined, name, whole, first, last, complete, proof):
                    break
        except UNREADABLE as error:
            proof.fail(f"cannot be joined: {error}", tensor=name, file=joined.views[0].file(name))
        count += 1
    verdict = "joined and equal" if complete else "compared where these ranks hold them"
    proof.detail = f"{count} tensors, {nbytes / 1e6:,.2f} MB {verdict}"


def _differs(joined: Joined, name: str, whole: np.ndarray, first: int, last: int, complete: bool, proof: Proof) -> bool:
    """True, and a failure, if a band of the joined tensor is not `whole`, where a rank holds it.

    `complete`: the ranks must hold every place. Raises CheckFailed where they cannot be compared.
    """
    band = joined.band(name, first, last)
    if complete:
        joined.require_covered(band, first)
    if band.words.shape != whole.shape or band.words.dtype != whole.dtype:
        raise CheckFailed(f"joined {band.words.dtype} {band.words.shape}, converted {whole.dtype} {whole.shape}")
    found = first_difference(band.known(band.words), band.known(whole))
    if found is None:
        return False
    index = found[0]
    index[band.axis] = int(np.flatnonzero(band.covered)[index[band.axis]])
    index[0] += first
    file = joined.owner(name, index).file(name)
    proof.fail("the word differs from the converted one", tensor=name, file=file, index=index, found=found[1],
               expected=found[2])  # fmt: skip
    return True


def _compare_digests(joined: Joined, report: Report, advance: Advance) -> None:
    """Without the converted directory: lay the joined tensor out as it was and compare its digest."""
    proof = report.begin("ranks: joined whole")
    nbytes = 0
    for name, shape in joined.shapes.items():
        record = joined.views[0].manifest.tensors.get(name)
        if record is None or record.split is None:
            continue
        whole, digest = record.split.whole, xxhash.xxh3_128()
        try:
            tile = layout_named(whole.layout)
            for first, last in bands_of(shape, record.dtype):
                words = joined.rows(name, first, last)
                digest.update((words if tile is None else tile.apply(words)).data)
                nbytes += words.nbytes
                advance(words.nbytes)
        except UNREADABLE as error:
            proof.fail(f"cannot be joined: {error}", tensor=name, file=joined.views[0].file(name))
            continue
        if digest.hexdigest() != whole.digest:
            proof.fail("digest of the joined tensor, laid out as before the split", tensor=name,
                       file=joined.views[0].file(name), found=digest.hexdigest(), expected=whole.digest)  # fmt: skip
    proof.detail = f"{len(joined.shapes)} tensors, {nbytes / 1e6:,.2f} MB joined, digests equal"
