"""One directory that holds a whole model, where a user may name the folder of its ranks as `serve` has it."""

from pathlib import Path

from ..checkpoint.errors import InputError
from ..checkpoint.manifest import has_manifest
from ..runtime.rank.identity import find_ranks


def whole_model(path: Path) -> Path:
    """The directory itself, or the only rank of a folder of ranks. Raises InputError for a folder of several."""
    if has_manifest(path) or not any(path.glob("rank-*-of-*")):
        return path
    ranks = find_ranks(path, scripted=False)
    if len(ranks) > 1:
        raise InputError(
            f"{path}: {len(ranks)} ranks, of which each alone predicts nothing. Give the source or converted directory that "
            "they were made from, or serve them and measure the server: `duovolt eval --url U`."
        )
    return ranks[0]
