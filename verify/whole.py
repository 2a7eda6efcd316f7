"""The ranks joined are the converted directory, word for word."""

import math

import numpy as np
import xxhash

from ..checkpoint.container import ITEMSIZE
from ..checkpoint.errors import CheckFailed, DuovoltError
from ..checkpoint.layouts import layout_named
from ..checkpoint.manifest import TensorRecord
from .join import Joined
from .ranks import RankSet
from .report import Proof, Report
from .stage import StageView, whole_shapes
from .words import bands_of, first_difference

UNREADABLE = (DuovoltError, OSError, ValueError)  # what damaged records and files raise while being read


def prove_joined(ranks: RankSet, converted: StageView | None, in_step: dict[str, str], report: Report) -> Joined | None:
    """Join the ranks and compare with the converted directory, or with the digests that their records carry.

    `in_step` maps tensors that were joined while they were scanned to the digest of the whole. Where it is the converted
    tensor's, as scanned, the words are equal; everything else is joined here, word by word, and a difference named.

    Returns the joined whole if it is complete, for proofs against the source.
    """
    shapes = whole_shapes(converted or ranks.views[0])
    joined = ranks.joined(shapes)
    in_step = in_step | _replicated(ranks)
    if converted is not None:
        _compare_words(joined, converted, ranks.complete, in_step, report)
    elif ranks.complete:
        _compare_digests(joined, in_step, report)
    else:
        report.skip("ranks: joined whole", "needs all ranks, or the converted directory beside them")
    return joined if ranks.complete else None


def _replicated(ranks: RankSet) -> dict[str, str]:
    """Digests of the tensors that all ranks hold whole, in the whole's layout, and alike."""
    found = {}
    for name in ranks.views[0].manifest.tensors if ranks.complete else ():
        records = [view.manifest.tensors.get(name) for view in ranks.views]
        digests = {view.digests.get(name) for view in ranks.views}
        whole = all(
            record is not None
            and record.split is not None
            and record.split.axis is None
            and record.layout == record.split.whole.layout
            for record in records
        )
        if whole and len(digests) == 1 and (digest := digests.pop()) is not None:
            found[name] = digest
    return found


def _same_bytes(name: str, shape: tuple[int, ...], record: TensorRecord, joined: Joined) -> bool:
    """True if equal digests of a tensor, converted and joined, mean equal words: nothing but the bytes could differ."""
    mine = joined.views[0].manifest.tensors.get(name)
    return (
        mine is not None
        and mine.split is not None
        and (mine.dtype, mine.split.whole.layout) == (record.dtype, record.layout)
        and tuple(record.canonical_shape) == shape
    )


def _compare_words(
    joined: Joined, converted: StageView, complete: bool, in_step: dict[str, str], report: Report
) -> None:
    proof = report.begin("converted -> ranks: words")
    count, nbytes = 0, 0
    for name, shape in joined.shapes.items():
        record = converted.manifest.tensors.get(name)
        if record is None:
            continue
        count += 1
        read = converted.digests.get(name)
        equal = _same_bytes(name, shape, record, joined) and read is not None and in_step.get(name) == read
        try:
            nbytes += _nbytes(record) if equal else _compare(joined, converted, name, shape, complete, proof)
        except UNREADABLE as error:
            proof.fail(f"cannot be joined: {error}", tensor=name, file=joined.views[0].file(name))
    verdict = "joined and equal" if complete else "compared where these ranks hold them"
    proof.detail = f"{count} tensors, {nbytes / 1e6:,.2f} MB {verdict}"


def _nbytes(record: TensorRecord) -> int:
    return math.prod(record.shape) * ITEMSIZE[record.dtype]


def _compare(
    joined: Joined, converted: StageView, name: str, shape: tuple[int, ...], complete: bool, proof: Proof
) -> int:
    """Compare one tensor in bands, up to the first that differs; bytes compared."""
    nbytes = 0
    for first, last in bands_of(shape, converted.manifest.tensors[name].dtype):
        whole = converted.rows(name, first, last)
        nbytes += whole.nbytes
        if _differs(joined, name, whole, first, last, complete, proof):
            break
    return nbytes


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


def _compare_digests(joined: Joined, in_step: dict[str, str], report: Report) -> None:
    """Without the converted directory: the digest of the joined tensor, laid out as it was."""
    proof = report.begin("ranks: joined whole")
    nbytes = 0
    for name, shape in joined.shapes.items():
        record = joined.views[0].manifest.tensors.get(name)
        if record is None or record.split is None:
            continue
        whole, digest = record.split.whole, xxhash.xxh3_128()
        if in_step.get(name) == whole.digest:
            nbytes += math.prod(whole.shape) * ITEMSIZE[record.dtype]
            continue
        try:
            tile = layout_named(whole.layout)
            for first, last in bands_of(shape, record.dtype):
                words = joined.rows(name, first, last)
                digest.update((words if tile is None else tile.apply(words)).data)
                nbytes += words.nbytes
        except UNREADABLE as error:
            proof.fail(f"cannot be joined: {error}", tensor=name, file=joined.views[0].file(name))
            continue
        if digest.hexdigest() != whole.digest:
            proof.fail("digest of the joined tensor, laid out as before the split", tensor=name,
                       file=joined.views[0].file(name), found=digest.hexdigest(), expected=whole.digest)  # fmt: skip
    proof.detail = f"{len(joined.shapes)} tensors, {nbytes / 1e6:,.2f} MB joined, digests equal"
