"""Grammars' masks for a round: what may follow an answer and its drafts, as the bits that `decide` takes."""

import numpy as np
import torch
from torch import Tensor

from ...grammar import GrammarFault
from ..lane import Lane


class Masks:
    """Masks of `rows` rows a lane, on the host.

    words   int32 [lanes * rows, V / 32 rounded up]; rows without a grammar allow everything
    faults  lane number in the round -> its first row behind which nothing may follow, and why
    """

    def __init__(self, lanes: list[Lane], drafts: list[list[int]], rows: int, vocabulary: int) -> None:
        """drafts[i] of lanes[i], at most rows - 1."""
        words = np.full((len(lanes) * rows, -(-vocabulary // 32)), -1, dtype=np.int32)
        self.faults: dict[int, tuple[int, GrammarFault]] = {}
        for number, (lane, drafted) in enumerate(zip(lanes, drafts, strict=True)):
            if lane.constraint is None:
                continue
            for row in range(len(drafted) + 1):
                try:
                    allowed = lane.constraint.mask(drafted[:row])
                except GrammarFault as fault:
                    self.faults[number] = (row, fault)
                    break
                packed = np.packbits(allowed.numpy(), bitorder="little")
                padded = np.zeros(words.shape[1] * 4, dtype=np.uint8)
                padded[: len(packed)] = packed
                words[number * rows + row] = padded.view("<i4")
        self.words: Tensor = torch.from_numpy(words)

    def fault(self, number: int, produced: int) -> str | None:
        """Why a lane that got `produced` tokens has none: one of them was drawn where nothing may follow."""
        row, fault = self.faults.get(number, (produced, None))
        return f"the grammar: {fault}" if fault is not None and row < produced else None
