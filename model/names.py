"""The spellings of the family's tensor names that libraries are known to write, and the one that we keep."""

from collections.abc import Iterable

from ..checkpoint.errors import InputError

# Prefix as found -> prefix as Hugging Face's release has it. Tried in order; a name that starts with none is kept, and
# the closed inventory judges it.
KNOWN_PREFIXES = (
    ("model.language_model.", "model.language_model."),
    ("model.visual.", "model.visual."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.visual."),
    ("model.vision_tower.", "model.visual."),
    ("model.mtp.", "mtp."),
    ("language_model.mtp.", "mtp."),
    ("model.layers.", "model.language_model.layers."),
    ("model.embed_tokens.", "model.language_model.embed_tokens."),
    ("model.norm.", "model.language_model.norm."),
)


def family_name(name: str) -> str:
    """The family's spelling of a tensor's name."""
    for found, kept in KNOWN_PREFIXES:
        if name.startswith(found):
            return kept + name.removeprefix(found)
    return name


def family_names(names: Iterable[str], where: str) -> dict[str, str]:
    """The family's spelling -> the name as found. Raises InputError if two names mean the same tensor."""
    found: dict[str, str] = {}
    for name in names:
        kept = family_name(name)
        if kept in found:
            raise InputError(f"{where}: {found[kept]!r} and {name!r} are the same tensor under two names.")
        found[kept] = name
    return found
