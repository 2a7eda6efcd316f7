"""How far one directory's predictions are from another's: Kullback-Leibler divergence, teacher-forced.

KL(P || Q) = sum over tokens of p (log p - log q), in nats, P the reference's distribution and Q the measured one's, both
after the same text; the mean over positions. Zero only for equal distributions, whatever the text says next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from ..runtime.engine.cache import Cache
from ..runtime.engine.loading import tokenizer_ids
from ..runtime.engine.model import Batch, Model, Segment
from ..runtime.engine.sources import open_source
from ..runtime.engine.weights import load_weights
from ..runtime.parallel.base import SoloCollective


@dataclass(frozen=True)
class Divergence:
    """Mean and largest over `tokens` positions, in nats; `agreement`: how often both hold the same token likeliest."""

    mean: float
    largest: float
    agreement: float
    tokens: int


class Predictor:
    """One directory's distributions over the ids that its tokenizer can emit."""

    def __init__(self, directory: Path, window: int) -> None:
        """Loads the weights. Raises InputError, CheckFailed."""
        source = open_source(directory)
        if source.tp_size != 1:
            raise InputError(
                f"{directory}: one of {source.tp_size} ranks, which alone predicts nothing. Give a source, a converted "
                "directory or rank-0-of-1."
            )
        self.sampleable = tokenizer_ids(directory, source.config.text.vocab_size)
        self._weights, self._window = load_weights(source), window
        self._model = Model(self._weights, SoloCollective(), window)

    @torch.inference_mode()
    def log_probabilities(self, tokens: list[int]) -> Tensor:
        """float64 [T, ids]: after each token of a window, what comes next."""
        count = len(tokens)
        if count > self._window:
            raise ValueError(f"{count} tokens in a window of {self._window}")
        cache = Cache.for_one(self._weights, count)
        batch = Batch(torch.tensor(tokens), [Segment(0, 0, count)], torch.arange(count).expand(3, -1), by_rows=False)
        logits = self._model.logits(self._model.forward(batch, cache), by_rows=False)
        return torch.log_softmax(logits[:, : self.sampleable].double(), dim=-1)


def divergence(
    reference: Predictor, measured: Predictor, windows: list[list[int]], tick: Callable[[int], None]
) -> Divergence:
    """KL of `measured` from `reference` over every position of `windows`. `tick` is called with tokens done.

    Raises InputError for two directories of different vocabularies.
    """
    if reference.sampleable != measured.sampleable:
        raise InputError(
            f"--against: {reference.sampleable} token ids there, {measured.sampleable} here: two models are compared."
        )
    found, same = [], 0
    for window in windows:
        p, q = reference.log_probabilities(window), measured.log_probabilities(window)
        found.append((p.exp() * (p - q)).sum(dim=-1))
        same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        tick(len(window))
    nats = torch.cat(found)
    return Divergence(float(nats.mean()), float(nats.max()), same / len(nats), len(nats))
