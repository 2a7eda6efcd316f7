"""From a directory to a running engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...checkpoint.directory import read_json
from ...checkpoint.errors import InputError
from ..images.processor import ImageProcessor
from ..parallel.base import Collective
from .engine import PREFILL_CHUNK, Engine
from .model import Model
from .reference import ReferenceExecutor
from .sources import open_source
from .vision import VisionTower
from .weights import load_weights

DraftHeadChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class EngineSettings:
    """Choices of the server; the same on every rank. `n_sampleable` None: as many as the directory's tokenizer has.

    `draft_head`: draw drafts with the reduced head: where there is one (`auto`), in any case (`on`), never (`off`).
    """

    max_context: int
    lanes: int = 1
    drafts: int = 0
    prefill_chunk: int = PREFILL_CHUNK
    n_sampleable: int | None = None
    drafts_from: list[list[int]] | None = None
    draft_head: DraftHeadChoice = "auto"


def tokenizer_ids(directory: Path, vocabulary: int) -> int:
    """One more than the largest id that directory/tokenizer.json can emit; `vocabulary` if there is no such file.

    Raises InputError for a tokenizer that has more ids than the head has rows.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return vocabulary
    try:
        content = read_json(path)
        ids = list(content["model"]["vocab"].values()) + [token["id"] for token in content.get("added_tokens", [])]
        count = max(ids) + 1
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{path}: no model.vocab that maps tokens to ids.") from None
    if count > vocabulary:
        raise InputError(f"{path}: the largest id is {count - 1}, the model has {vocabulary} rows.")
    return count


def load_engine(directory: Path, collective: Collective, settings: EngineSettings) -> Engine:
    """Load one rank's weights from a rank, converted or plain directory. Raises InputError, CheckFailed."""
    source = open_source(directory)
    if (source.tp_size, source.tp_rank) != (collective.size, collective.rank):
        raise InputError(
            f"{directory}: holds rank {source.tp_rank} of {source.tp_size}, this process is rank {collective.rank} "
            f"of {collective.size}."
        )
    text = source.config.text
    if settings.max_context > text.max_position_embeddings:
        raise InputError(
            f"{directory}: a context of {settings.max_context} was asked for, the model knows "
            f"{text.max_position_embeddings} positions."
        )
    sampleable = settings.n_sampleable
    if sampleable is None:
        sampleable = tokenizer_ids(directory, text.vocab_size)
    if settings.draft_head == "on" and not text.draft_rows:
        raise InputError(
            f"{directory}: --draft-head on: these weights have no draft head. Convert with `draft_head = ROWS` in the "
            "recipe, or leave the option out."
        )
    weights, vision = load_weights(source), source.config.vision
    processor = tower = None
    if weights.vision is not None and vision is not None:
        processor = ImageProcessor.read(directory, vision)
        tower = VisionTower(weights.vision, processor)
    executor = ReferenceExecutor(
        Model(weights, collective, settings.max_context, settings.draft_head != "off"),
        max_context=settings.max_context,
        lanes=settings.lanes,
        drafts=settings.drafts if settings.drafts_from is None else 0,
        n_sampleable=sampleable,
        tower=tower,
    )
    return Engine(
        executor,
        max_context=settings.max_context,
        lanes=settings.lanes,
        n_sampleable=sampleable,
        prefill_chunk=settings.prefill_chunk,
        drafts_from=settings.drafts_from,
        tokenizer=path if (path := directory / "tokenizer.json").exists() else None,
        processor=processor,
        image_token=source.config.image_token,
    )
