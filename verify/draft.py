"""The draft head is chosen rows of the head: ids that can be, every special token among them, every word the head's."""

import numpy as np

from ..checkpoint.bands import CanonicalReader
from ..checkpoint.directory import read_json
from ..checkpoint.encodings import part_of, tile_of, words_of
from ..checkpoint.encodings.weights import weights_of
from ..checkpoint.errors import DuovoltError
from ..checkpoint.manifest import DRAFT_HEAD, TensorRecord
from ..model.inventory import DRAFT_IDS, head_of
from .report import Proof, Report
from .stage import StageView
from .whole import UNREADABLE
from .words import bands_of, first_difference

TOKENIZER = "tokenizer.json"


def prove_draft_head(view: StageView, reader: CanonicalReader, report: Report) -> None:
    """`reader` gives whole tensors: the converted directory's, or those of joined ranks; `view` their records."""
    config, manifest = view.config, view.manifest
    if config is None or not config.text.draft_rows:
        return
    proof = report.begin(f"{'converted' if manifest.stage == 'converted' else 'ranks'}: draft head")
    try:
        ids = reader.rows(DRAFT_IDS, 0, config.text.draft_rows).reshape(-1).astype(np.int64)
        _judge_ids(ids, view, config.text.vocab_size, proof)
        if proof.failures:
            return
        weights = weights_of(manifest)
        head, draft = weights[head_of(config)], weights[DRAFT_HEAD]
        if not _same_form(manifest.tensors, head, draft, proof):
            return
        for part, name in draft.items():
            _compare(manifest.tensors, part, name, head[part], ids, config.text.vocab_size, reader, view, proof)
        proof.detail = f"{len(ids)} of {config.text.vocab_size} rows, each word the head's"
    except (*UNREADABLE, LookupError) as error:
        proof.fail(f"cannot be compared: {error}", tensor=DRAFT_HEAD, file=view.file(DRAFT_HEAD))


def _judge_ids(ids: np.ndarray, view: StageView, vocabulary: int, proof: Proof) -> None:
    file = view.file(DRAFT_IDS)
    if len(wrong := np.flatnonzero((ids < 0) | (ids >= vocabulary))):
        at = int(wrong[0])
        proof.fail("no row of the head", tensor=DRAFT_IDS, file=file, index=[at], found=str(ids[at]),
                   expected=f"0 to {vocabulary - 1}")  # fmt: skip
    if len(wrong := np.flatnonzero(np.diff(ids) <= 0)):
        at = int(wrong[0]) + 1
        proof.fail("ids do not ascend", tensor=DRAFT_IDS, file=file, index=[at], found=str(ids[at]),
                   expected=f"more than {ids[at - 1]}")  # fmt: skip
    path = view.path / TOKENIZER
    try:
        special = {int(token["id"]) for token in read_json(path).get("added_tokens") or []}
    except (DuovoltError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        proof.fail(f"the special tokens cannot be read: {error}", file=str(path))
        return
    if missing := sorted(special - set(ids.tolist())):
        proof.fail(f"{len(missing)} special tokens have no row", tensor=DRAFT_IDS, file=file, expected=str(missing[0]))


def _same_form(tensors: dict[str, TensorRecord], head: dict[str, str], draft: dict[str, str], proof: Proof) -> bool:
    """True if the draft head is encoded as the head is; tiles may be of one row, so that rows can be chosen."""
    ours, theirs = ({tensors[name].encoding for name in parts.values()} for parts in (draft, head))
    same = ours == theirs
    if len(ours) == len(theirs) == 1 and not same:
        mine, its = ours.copy().pop(), theirs.copy().pop()
        tile, whole = tile_of(mine), tile_of(its)
        same = tile is not None and whole is not None and tile == (1, whole[1]) and words_of(mine) == words_of(its)
    if not same or head.keys() != draft.keys():
        proof.fail("encoded otherwise than the head", tensor=DRAFT_HEAD, found=str(sorted(ours)),
                   expected=str(sorted(theirs)))  # fmt: skip
        return False
    return True


def _compare(
    tensors: dict[str, TensorRecord], part: str, name: str, whole: str, ids: np.ndarray, vocabulary: int,
    reader: CanonicalReader, view: StageView, proof: Proof,
) -> None:  # fmt: skip
    """Every row of a part is the head's row of that id; a part without rows is the head's."""
    described = part_of(tensors[whole].encoding, part)
    unit = 1 if described is None else described.unit[0]
    wanted = np.zeros(1, np.int64) if unit is None else ids // unit
    rows = 1 if unit is None else -(-vocabulary // unit)
    inner = tuple(tensors[whole].canonical_shape[1:])
    for first, last in bands_of((rows, *inner), tensors[whole].dtype):
        low, high = (int(n) for n in np.searchsorted(wanted, (first, last)))
        if low == high:
            continue
        theirs = reader.rows(whole, first, last)[wanted[low:high] - first]
        found = first_difference(reader.rows(name, low, high), theirs)
        if found is not None:
            index = [found[0][0] + low, *found[0][1:]]
            proof.fail("the word differs from the head's", tensor=name, file=view.file(name), index=index,
                       found=found[1], expected=found[2])  # fmt: skip
            return
