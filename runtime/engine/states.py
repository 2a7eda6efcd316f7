"""State of the gated delta rule layers: one slot a lane, and the trail of a round that may be cut back."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Trail:
    """What a layer went through in a round for one lane: enough to stop after any of its tokens.

    rows    the convolution's inputs, history first: [W - 1 + T, C]
    states  the delta rule's state after every token: [T, V heads, DV, DK]
    """

    rows: Tensor
    states: Tensor


class RecurrentStates:
    """Convolution histories [lanes, W - 1, C] and delta rule states [lanes, V heads, DV, DK] of every delta layer."""

    def __init__(self, layers: int, lanes: int, conv_width: int, channels: int, state: tuple[int, int, int]) -> None:
        self._kept = conv_width - 1
        self.histories = [torch.zeros(lanes, self._kept, channels) for _ in range(layers)]
        self.states = [torch.zeros(lanes, *state) for _ in range(layers)]
        self._trails: dict[tuple[int, int], Trail] = {}

    def reset(self, lane: int) -> None:
        """Start a lane from nothing."""
        for tensor in self.of_lane(lane):
            tensor.zero_()
        self._trails = {key: trail for key, trail in self._trails.items() if key[1] != lane}

    def of_lane(self, lane: int) -> list[Tensor]:
        """A lane's histories, then its states, of every layer: views."""
        return [tensor[lane] for tensor in (*self.histories, *self.states)]

    def store(self, layer: int, lane: int, rows: Tensor, state: Tensor) -> None:
        """Set a lane's state after a prefill chunk: its convolution inputs and the last state."""
        self.histories[layer][lane] = rows[len(rows) - self._kept :]
        self.states[layer][lane] = state

    def remember(self, layer: int, lane: int, trail: Trail) -> None:
        """Keep a round's trail until `commit` says how much of it stands."""
        self._trails[layer, lane] = trail

    def commit(self, lane: int, tokens: int) -> None:
        """Move a lane to its state after the first `tokens` (at least one) tokens of the round."""
        for layer in range(len(self.states)):
            trail = self._trails.pop((layer, lane))
            assert 1 <= tokens <= len(trail.states), f"{tokens} tokens of a round of {len(trail.states)}"
            self.histories[layer][lane] = trail.rows[tokens : tokens + self._kept]
            self.states[layer][lane] = trail.states[tokens - 1]
