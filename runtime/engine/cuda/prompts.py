"""Where a prompt's work runs: on a stream whose products go first, while the next products' plain weights are made beside; and
which plain weights stay."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ....kernels.plain_ahead import PlainAhead
from ....kernels.plain_kept import PlainKept
from ....kernels.tuning import choice_on
from ....model.config import ModelConfig
from .plan import ahead_bytes, plain_bytes

_FIRST = -1  # torch's highest priority


class Prompts:
    """Chunks' stream, and the memory of plain weights that are made ahead; neither where the card's choice is against it. The
    memory of those that stay, where there is some.

    Without room for either each product makes its own weights, in turn.
    """

    def __init__(
        self, config: ModelConfig, tp: int, device: torch.device, keep: int = 0, *, halves: bool = False
    ) -> None:
        """keep: bytes of plain weights that stay; halves: chunks go in two, which ask for a matrix one soon after the other."""
        self._device = device
        self._ahead: PlainAhead | None = None
        self._kept: PlainKept | None = None
        if device.type != "cuda":
            return
        ahead = choice_on(device).layers_ahead(torch.cuda.get_device_capability(device))
        if keep:
            lately = ahead_bytes(config, tp, 1.0) // 2 if halves and not ahead else 0
            try:
                self._kept = PlainKept(keep // 2, plain_bytes(config, tp) // 2, device, lately=lately)
            except torch.OutOfMemoryError:
                print("duovolt rank: no room to keep prompts' plain weights", file=sys.stderr, flush=True)
        nbytes = ahead_bytes(config, tp, ahead)
        if not nbytes:
            return
        try:
            self._ahead = PlainAhead(nbytes // 2, device)
        except torch.OutOfMemoryError:
            print("duovolt rank: no room to make prompts' plain weights ahead: in turn", file=sys.stderr, flush=True)
            return
        self._stream = torch.cuda.Stream(device, priority=_FIRST)

    @property
    def ahead(self) -> bool:
        """Whether plain weights are made ahead."""
        return self._ahead is not None

    @property
    def told(self) -> str:
        """What of this decides the rounding of a prompt's products, behind what the card's choice says of it."""
        return f",ahead:{choice_on(self._device).sparing_up_to}" if self.ahead else ""

    @property
    def kept(self) -> str:
        """Plain weights that stay, for the log line."""
        return "off" if self._kept is None else f"{self._kept.memory.nbytes / 1e9:.2f}GB"

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within it work goes behind all that the current stream was given, and what that one is given after, behind it."""
        if self._ahead is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextmanager
    def reading(self, kind: str, tokens: int, *, layers: bool = True) -> Iterator[None]:
        """Around a pass of so many tokens; `kind`: passes of one ask for the same weights in the same order. `layers`: they are
        those of the model's layers, of which some stay."""
        ahead, kept = self._ahead, self._kept if layers else None
        with (
            kept.serving() if kept else nullcontext(),
            ahead.reading((kind, tokens <= choice_on(self._device).wide_up_to)) if ahead else nullcontext(),
        ):
            yield
