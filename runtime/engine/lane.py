"""One answer in the making, as the host knows it: its request, its tokens, its pages."""

import torch
from torch import Tensor

from ..messages import GenerateRequest
from .constraint import Constraint
from .content import Content


class Lane:
    """A running request in lane number `index`. What computes it keeps its own state beside.

    limit       tokens the answer may have
    pages       pages of keys and values, in the order of its tokens
    tokens      prompt and answer
    read        prompt tokens that have been read
    rounds      decode rounds so far
    constraint  the grammar that the answer is held to; it knows the tokens of `tokens`
    passed      chunks of other prompts that were read since this prompt's last
    content     names its beginnings, where there is a prefix cache
    prefixes    names of those that it went on from or that were kept of it
    forced      instead of the MTP layer's drafts: those of each round, none after the last
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        limit: int,
        pages: list[int],
        constraint: Constraint | None = None,
        forced: list[list[int]] | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.limit = limit
        self.pages = pages
        self.constraint = constraint
        self.forced = forced
        self.tokens = list(request.prompt)
        self.read = 0
        self.rounds = 0
        self.passed = 0
        self.content: Content | None = None
        self.prefixes: list[bytes] = []
        self._stops = frozenset[int]() if request.ignore_eos else frozenset(request.stop_ids)  # there may be very many
        self.rope_delta = 0
        if request.rope_positions is not None:
            self.rope_delta = max(map(max, request.rope_positions)) + 1 - len(request.prompt)

    @property
    def prefilling(self) -> bool:
        """The answer has not begun."""
        return not self.produced

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens the answer may still grow by."""
        return self.limit - self.produced

    @property
    def length(self) -> int:
        """Tokens whose keys, values and states are in place; an answer's last token is read by the round after it."""
        return self.read + max(0, self.produced - 1)

    def forced_drafts(self) -> list[int] | None:
        """The given drafts of the present round; None where the MTP layer drafts."""
        if self.forced is None:
            return None
        drafts = self.forced[self.rounds] if self.rounds < len(self.forced) else []
        return drafts[: self.remaining - 1]

    def rope(self, start: int, count: int) -> Tensor:
        """Rotary positions int64 [3, count] of the tokens at index start .. start + count - 1."""
        given = self.request.rope_positions
        after = torch.arange(start, start + count) + self.rope_delta
        if given is None or start >= len(self.request.prompt):
            return after.expand(3, -1)
        inside = torch.tensor([row[start : start + count] for row in given], dtype=torch.int64)
        return torch.cat((inside, after[inside.shape[1] :].expand(3, -1)), dim=-1)

    def cut(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """Those of `tokens`, coming next, up to a stop id or the limit; and the reason to finish, if there is one."""
        for count, token in enumerate(tokens, start=1):
            if token in self._stops:
                return tokens[:count], "stop"
            if count >= self.remaining:
                return tokens[:count], "length"
        return tokens, None

    def add(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """Take what `cut` leaves: the tokens taken, and the reason to finish, if there is one."""
        taken, reason = self.cut(tokens)
        self.tokens += taken
        if self.constraint is not None:
            for token in taken:
                self.constraint.accept(token)
        return taken, reason
