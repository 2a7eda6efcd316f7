"""Which rows of the head a draft head keeps: the most frequent tokens, by a list or by the tokenizer's merge order.

A draft only guesses, so that a head of half the vocabulary costs little acceptance and half the reading; the full head
verifies every draft. Special tokens are always kept: the end of a turn must be drafted too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.container import TensorEntry
from ..checkpoint.digest import digest_bytes
from ..checkpoint.directory import read_json, read_text
from ..checkpoint.errors import InputError
from ..checkpoint.layouts import ROWS
from ..checkpoint.numbers import is_count
from .recipe import Recipe
from .source import Source

TOKENIZER = "tokenizer.json"
LISTED = "draft_head_tokens"
MAX_LIST = 32 << 20  # bytes: some lines for each token of any vocabulary


@dataclass(frozen=True)
class DraftHead:
    """`ids` int32 [rows], ascending: the rows of the head that are kept. `origin` says in the manifest how chosen."""

    ids: np.ndarray
    origin: TensorEntry

    @property
    def digest(self) -> str:
        """xxh3-128 of the ids."""
        return digest_bytes(np.ascontiguousarray(self.ids).tobytes())


def _token_ids(content: Any, path: Path) -> tuple[list[int], list[int]]:
    """(special ids, other ids in merge order) of a tokenizer.json. Raises InputError for anything else."""
    try:
        vocabulary: dict[str, int] = content["model"]["vocab"]
        merges: list[Any] = content["model"].get("merges") or []
        special = [token["id"] for token in content.get("added_tokens") or []]
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
        made = {left + right: rank for rank, (left, right) in reversed(list(enumerate(pairs)))}
        others = sorted(vocabulary.items(), key=lambda item: (made.get(item[0], -1), item[1]))
        found = [number for _, number in others]
        if not all(type(number) is int for number in (*special, *found)):
            raise TypeError
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{path}: no model.vocab and model.merges from which to choose a draft head.") from None
    return special, found


def _listed_ids(path: Path) -> Iterator[int]:
    """The ids of a frequency list: a number a line, most frequent first; what follows the number is not read."""
    lines = read_text(path, MAX_LIST, LISTED).splitlines()
    if not lines:
        raise InputError(f"{path}: {LISTED}: an empty list. Give token ids, one a line, or leave the list out.")
    for number, line in enumerate(lines, 1):
        word = line.split()[0] if line.split() else ""
        if not (is_count(word, 9)):
            raise InputError(f"{path}: line {number} is {line[:40]!r}, expected a token id.")
        yield int(word)


def choose(source: Source, recipe: Recipe) -> DraftHead | None:
    """The draft head that a recipe asks for; None if it asks for none.

    Raises InputError if there is nothing to choose from, too little, or no MTP layer that would draft.
    """
    rows, path = recipe.draft_head, source.checkpoint.path / TOKENIZER
    if not rows:
        return None
    where = f"recipe {recipe.name!r}: draft_head = {rows}"
    if not source.config.mtp_layers:
        raise InputError(f"{where}: the source has no MTP layer, so nothing will draft. Leave draft_head out.")
    if not path.exists():
        raise InputError(f"{where}: the source has no {TOKENIZER}, which knows special tokens and merge order.")
    special, others = _token_ids(read_json(path), path)
    listed = [] if recipe.draft_head_tokens is None else list(_listed_ids(Path(recipe.draft_head_tokens)))
    chosen = _first(rows, (*special, *listed, *others))
    if len(chosen) < rows or len(set(special)) > rows:
        raise InputError(
            f"{where}: the tokenizer has {len(set(special) | set(others))} tokens, {len(set(special))} of them special; "
            "give a number between."
        )
    limit = source.config.text.vocab_size
    if (largest := max(chosen)) >= limit:
        raise InputError(f"{where}: token {largest} is beyond the {limit} rows of the head.")
    ids = np.array(sorted(chosen), np.int32)
    name = TOKENIZER if recipe.draft_head_tokens is None else LISTED
    return DraftHead(ids, TensorEntry(name, "I32", (rows,), path, 0, ids.nbytes))


def _first(count: int, ids: Iterable[int]) -> set[int]:
    found: set[int] = set()
    for number in ids:
        if len(found) == count:
            break
        found.add(number)
    return found


def gathered(bands: Iterable[np.ndarray], rows: np.ndarray) -> Iterator[np.ndarray]:
    """The chosen `rows`, ascending, of a matrix that comes as bands; in bands of whole tile rows, but for the last."""
    first, ready = 0, []
    for band in bands:
        low, high = np.searchsorted(rows, (first, first + len(band)))
        ready.append(band[rows[low:high] - first])
        first += len(band)
        if (count := sum(map(len, ready))) >= len(band):
            joined, whole = np.concatenate(ready), count // ROWS * ROWS
            ready = [joined[whole:]]
            if whole:
                yield joined[:whole]
    if (left := np.concatenate(ready)).size:
        yield left
