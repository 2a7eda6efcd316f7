"""One answer in the making: its request, its tokens, and what the MTP layer has yet to read."""

import torch
from torch import Tensor

from ..messages import GenerateRequest
from .constraint import Constraint
from .sampling import Sampler
from .vision import PromptImages, VisionTower


class Lane:
    """A running request in lane number `index` of the cache.

    tokens   prompt and answer
    read     prompt tokens that the cache holds already; the prompt is done when all are
    hidden   the target's hidden states [r, hidden] that the MTP layer has not seen, the last r positions of the cache
    rounds   decode rounds so far
    images   the prompt's pictures that are yet to be read
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        limit: int,
        vocabulary: int,
        constraint: Constraint | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.limit = limit
        self.sampler = Sampler(request.sampling, request.prompt, vocabulary, constraint)
        self.tokens = list(request.prompt)
        self.read = 0
        self.rounds = 0
        self.hidden: Tensor | None = None
        self.images = PromptImages(request.images, tower)
        self.rope_delta = 0
        if request.rope_positions is not None:
            self.rope_delta = max(map(max, request.rope_positions)) + 1 - len(request.prompt)

    @property
    def prefilling(self) -> bool:
        return self.read < len(self.request.prompt)

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens the answer may still grow by."""
        return self.limit - self.produced

    def rope(self, start: int, count: int) -> Tensor:
        """Rotary positions int64 [3, count] of the tokens at index start .. start + count - 1."""
        given = self.request.rope_positions
        after = torch.arange(start, start + count) + self.rope_delta
        if given is None or start >= len(self.request.prompt):
            return after.expand(3, -1)
        inside = torch.tensor([row[start : start + count] for row in given], dtype=torch.int64)
        return torch.cat((inside, after[inside.shape[1] :].expand(3, -1)), dim=-1)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Add hidden states [r, hidden] that the MTP layer will read in the next draft."""
        self.hidden = hidden if self.hidden is None else torch.cat((self.hidden, hidden))

    def add(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """Take tokens up to a stop id or the limit: those taken, and the reason to finish, if there is one."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            self.sampler.accept(token)
            if not self.request.ignore_eos and token in self.request.stop_ids:
                return taken, "stop"
            if self.remaining <= 0:
                return taken, "length"
        return taken, None
