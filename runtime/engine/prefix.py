"""The prefix cache: beginnings of texts whose keys, values and states are kept for later prompts that begin alike.

A hybrid model can go on only from where a state was saved: a prefix is a saved state and the pages that its tokens lie
in. Pages are shared with the lane that wrote them and with other prefixes; a later lane shares those that are final and
copies the last one or two, which it will write into. Everything follows from the messages and their order, so that
the ranks keep, find and let go the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .content import Content
from .executor import Executor
from .lane import Lane
from .pages import PAGE, PagePool, pages_for
from .speculation import MAX_DRAFTS

INTERVAL = 8192  # tokens between the states of a long prompt


@dataclass(frozen=True)
class Prefix:
    """`length` tokens under a name, and what is kept of them.

    settled  tokens whose keys and values nobody writes any more; behind them stands what depends on the tokens to come
    """

    name: bytes
    whole: bytes
    length: int
    settled: int
    pages: list[int]
    state: object

    @property
    def shared(self) -> list[int]:
        """Pages that a lane which goes on from here may share."""
        return self.pages[: self.settled // PAGE]

    @property
    def copied(self) -> list[int]:
        """Pages that it must copy, the next after those shared."""
        return self.pages[self.settled // PAGE :]


class PrefixCache:
    """Prefixes, the one used longest ago first to go.

    states    how many are kept at most
    interval  a prompt's state is also saved at each multiple of so many tokens
    evicted   prefixes let go so far
    """

    def __init__(self, pool: PagePool, executor: Executor, states: int, interval: int) -> None:
        self.states = states
        self.interval = interval
        self.evicted = 0
        self._pool = pool
        self._executor = executor
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self._ends: dict[bytes, dict[int, dict[bytes, Prefix]]] = {}  # name of the whole pages -> length -> name

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(list(self._kept.values()))

    def find(self, content: Content, length: int) -> Prefix | None:
        """The longest prefix of the text's first `length` tokens."""
        levels = {prefix.length // PAGE for prefix in self._kept.values()}
        for whole in sorted((level for level in levels if level <= length // PAGE), reverse=True):
            ends = self._ends.get(content.pages(whole), {})
            for end in sorted(ends, reverse=True):
                if end <= length and (prefix := ends[end].get(content.name(end))):
                    return prefix
        return None

    def worth_waiting(self, content: Content, length: int, found: int, lanes: list[Lane]) -> bool:
        """Whether a lane is about to keep most of what a prompt of `length` tokens, `found` of them kept, has left to read.

        So it is for the choices of one request: the prompt is read once.
        """
        least = found + max(PAGE, (length - found + 1) // 2)
        for lane in lanes:
            assert lane.content is not None
            ends = {len(lane.request.prompt), *lane.request.checkpoints}
            coming = [end for end in ends if max(lane.read + 1, least) <= end <= length]
            if any(lane.content.name(end) == content.name(end) for end in coming):
                return True
        return False

    def use(self, prefix: Prefix) -> None:
        """A lane goes on from it: it is the last to go."""
        self._kept.move_to_end(prefix.name)

    def wanted(self, lane: Lane) -> bool:
        """True where the prompt's state is worth saving: at its end, where the request says, and every so often.

        A prompt of very many intervals leaves some out, so that it takes no more than half of all places by itself.
        """
        read, length = lane.read, len(lane.request.prompt)
        intervals = -(-length // (self.interval * max(1, self.states // 2)))
        return read == length or read in lane.request.checkpoints or read % (self.interval * intervals) == 0

    def keep(self, lane: Lane) -> None:
        """Save the lane's present state, if nobody has saved the same, and keep the pages of its tokens."""
        assert lane.content is not None
        length = lane.length
        if length < PAGE:
            return
        name = lane.content.name(length)
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        state = self._executor.save(lane)
        if state is None:
            return
        while len(self._kept) >= self.states:
            self.evict()
        behind = 1 + MAX_DRAFTS if lane.produced else 1  # tokens that the MTP layer may have yet to read
        pages = lane.pages[: pages_for(length)]
        prefix = Prefix(name, lane.content.pages(length // PAGE), length, max(0, length - behind), pages, state)
        self._pool.keep(pages)
        self._kept[name] = prefix
        self._ends.setdefault(prefix.whole, {}).setdefault(length, {})[name] = prefix
        lane.prefixes.append(name)

    def evict(self) -> None:
        """Let go of the prefix that was used longest ago."""
        self.evicted += 1
        self._remove(next(iter(self._kept)))

    def distrust(self, lane: Lane) -> None:
        """The lane's numbers have gone wrong: forget what it went on from and what was kept of it."""
        for name in lane.prefixes:
            if name in self._kept:
                self._remove(name)

    def _remove(self, name: bytes) -> None:
        prefix = self._kept.pop(name)
        ends = self._ends[prefix.whole]
        del ends[prefix.length][name]
        if not ends[prefix.length]:
            del ends[prefix.length]
        if not ends:
            del self._ends[prefix.whole]
        self._pool.forget(prefix.pages)
