"""The contract of a collective: what the engine needs from the other ranks, and its form for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the proxy and the scripted backend start without torch
    import torch


class Collective(Protocol):
    """Exchange between the ranks of one model. Every rank makes the same calls in the same order.

    Results carry the same bits on every rank: sums are taken in rank order, rank 0 first.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sum of every rank's `x` (any shape), in rank order; `x` is left as it was."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` side by side on the last axis, in rank order."""
        ...


class SoloCollective:
    """The collective of a single rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x
