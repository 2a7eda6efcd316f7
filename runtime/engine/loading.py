"""From a directory to a running engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...checkpoint.directory import read_json
from ...checkpoint.errors import InputError
from ..images.processor import ImageProcessor
from ..parallel.base import Collective
from .engine import PREFILL_CHUNK, Engine
from .executor import Executor
from .model import Model
from .prefix import INTERVAL
from .reference import ReferenceExecutor
from .sources import WeightSource, open_source
from .vision import VisionTower, VisionWeights
from .weights import load_weights

DraftHeadChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class EngineSettings:
    """Choices of the server; the same on every rank. `n_sampleable` None: as many as the directory's tokenizer has.

    `prefix_bytes`: memory for the states of prefixes kept for later prompts, one at least each `prefix_interval` tokens.
    `draft_head`: draw drafts with the reduced head: where there is one (`auto`), in any case (`on`), never (`off`).
    `pages` of keys and values in the pool; None: enough for every lane at full context.
    """

    max_context: int
    lanes: int = 1
    drafts: int = 0
    prefill_chunk: int = PREFILL_CHUNK
    n_sampleable: int | None = None
    drafts_from: list[list[int]] | None = None
    draft_head: DraftHeadChoice = "auto"
    pages: int | None = None
    prefix_bytes: int = 0
    prefix_interval: int = INTERVAL


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


def check_settings_fit(source: WeightSource, size: int, rank: int, settings: EngineSettings) -> None:
    """Raises InputError if the weights are another rank's, or the model cannot do what is asked of it."""
    text = source.config.text
    if (source.tp_size, source.tp_rank) != (size, rank):
        raise InputError(
            f"{source.where}: holds rank {source.tp_rank} of {source.tp_size}, this process is rank {rank} of {size}."
        )
    if settings.max_context > text.max_position_embeddings:
        raise InputError(
            f"{source.where}: a context of {settings.max_context} was asked for, the model knows "
            f"{text.max_position_embeddings} positions."
        )
    if settings.draft_head == "on" and not text.draft_rows:
        raise InputError(
            f"{source.where}: --draft-head on: these weights have no draft head. Convert with `draft_head = ROWS` in the "
            "recipe, or leave the option out."
        )


def sampleable(directory: Path, source: WeightSource, settings: EngineSettings) -> int:
    """Ids that may be drawn."""
    if settings.n_sampleable is not None:
        return settings.n_sampleable
    return tokenizer_ids(directory, source.config.text.vocab_size)


def tower_of(directory: Path, source: WeightSource, weights: VisionWeights | None) -> VisionTower | None:
    """What reads pictures, if the model can."""
    if weights is None or source.config.vision is None:
        return None
    return VisionTower(weights, ImageProcessor.read(directory, source.config.vision))


def engine_of(
    executor: Executor, directory: Path, source: WeightSource, tower: VisionTower | None, settings: EngineSettings
) -> Engine:
    """The scheduler over what computes."""
    return Engine(
        executor,
        max_context=settings.max_context,
        lanes=settings.lanes,
        n_sampleable=sampleable(directory, source, settings),
        prefill_chunk=settings.prefill_chunk,
        drafts_from=settings.drafts_from,
        tokenizer=path if (path := directory / "tokenizer.json").exists() else None,
        processor=None if tower is None else tower.processor,
        image_token=source.config.image_token,
        video_token=source.config.video_token,
        prefix_bytes=settings.prefix_bytes,
        prefix_interval=settings.prefix_interval,
    )


def load_engine(directory: Path, collective: Collective, settings: EngineSettings) -> Engine:
    """Load one rank's weights from a rank, converted or plain directory. Raises InputError, CheckFailed."""
    source = open_source(directory)
    check_settings_fit(source, collective.size, collective.rank, settings)
    ids = sampleable(directory, source, settings)
    weights = load_weights(source)
    tower = tower_of(directory, source, weights.vision)
    executor = ReferenceExecutor(
        Model(weights, collective, settings.max_context, settings.draft_head != "off"),
        max_context=settings.max_context,
        lanes=settings.lanes,
        drafts=settings.drafts if settings.drafts_from is None else 0,
        n_sampleable=ids,
        pages=settings.pages,
        tower=tower,
    )
    return engine_of(executor, directory, source, tower, settings)
