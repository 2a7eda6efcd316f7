"""Which way two cards exchange: tried in child processes, judged once, and obeyed by both ranks and by NCCL.

A driver's word that peer memory works proves nothing, so every way carries real data first. The children are bounded in
time: a way that hangs costs its children, never the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from ...checkpoint.errors import EnvironmentFault, InputError
from .faults import MAILBOX_DOOR
from .twins import DISTRUSTED, TOGETHER, TRUSTED, Heard, run_twins

Wish = Literal["auto", "host", "ipc", "nccl"]
Small = Literal["host", "ipc", "nccl"]
WISHES = ("auto", "host", "ipc", "nccl")
TRANSPORTS = ("ipc", "host", "nccl")
SECONDS = 90.0  # of one pair of children, their start included
PROBE = "duovolt.runtime.parallel.probe"
CLEARLY = 0.8
ALONE = "it takes a card for every rank"
SLOW = 1 / 40e3  # microseconds a byte: below 40 GB/s a prompt's exchanges are worth hiding (docs/collectives.md)
_WORD = "expected host, ipc or nccl, and then nccl=BYTES, halves and peer"


@dataclass(frozen=True)
class Verdict:
    """What was found of one way. `fault`: why it is not used; `note`: what others have reported of it.

    `microseconds` of a 40 KB sum in a graph, the slower rank's; `large`: the same by bytes.
    """

    transport: str
    fault: str | None
    microseconds: float | None = None
    large: dict[int, float] = field(default_factory=dict)
    note: str | None = None

    def __str__(self) -> str:
        if self.fault is not None:
            return f"{self.transport} not used ({self.fault})"
        time = "" if self.microseconds is None else f", {self.microseconds:.1f} us"
        note = "" if self.note is None else f", though reported: {self.note}"
        return f"{self.transport} right{time}{note}"


@dataclass(frozen=True)
class Choice:
    """The way for small messages; from how many bytes on NCCL takes large ones (None: never); whether NCCL may use peer
    memory; and whether a prompt's chunk goes in two halves, so that one's exchange stands beside the other's computation."""

    small: Small
    nccl_from: int | None
    peer_memory: bool
    found: tuple[Verdict, ...] = ()
    halves: bool = False

    def __str__(self) -> str:
        if self.small == "nccl":
            large = ""
        elif self.nccl_from is None:
            large = ", large messages too"
        else:
            large = f", nccl from {self.nccl_from >> 10} KB"
        halves = ", chunks in halves" if self.halves else ""
        return f"{self.small}{large}{halves}; found: {'; '.join(map(str, self.found))}"

    @property
    def argument(self) -> str:
        """As a word for a rank's command line; `Choice.parse` reads it."""
        large = [] if self.nccl_from is None else [f"nccl={self.nccl_from}"]
        flags = [word for word, is_so in (("halves", self.halves), ("peer", self.peer_memory)) if is_so]
        return ",".join([self.small, *large, *flags])

    @staticmethod
    def parse(text: str) -> Choice:
        """Raises InputError if it is no `argument`."""
        small, *more = text.split(",")
        peer_memory = more[-1:] == ["peer"]
        more = more[:-1] if peer_memory else more
        halves = more[-1:] == ["halves"]
        more = more[:-1] if halves else more
        large = [word.removeprefix("nccl=") for word in more]
        if small not in TRANSPORTS or len(large) > 1 or not all(word.isdecimal() for word in large):
            raise InputError(f"--collective {text}: {_WORD}.")
        return Choice(cast(Small, small), int(large[0]) if large else None, peer_memory, halves=halves)


def choose(
    wish: Wish,
    cards: Sequence[str] = (),
    run: Callable[[Sequence[str], float], list[Heard]] | None = None,
    seconds: float = SECONDS,
) -> Choice:
    """Try what `wish` leaves open between two cards and choose. `run` starts the children.

    cards: their names for CUDA_VISIBLE_DEVICES in rank order; the first two that are seen if empty. One card twice: both
    ranks are on it, so there is neither NCCL nor a time to choose by, and the first way that is right is taken. Raises
    EnvironmentFault if what was wished for, or everything, fails; InputError for NCCL on one card.
    """
    visible = list(dict.fromkeys(cards))
    together = len(visible) < len(cards)
    if together and wish == "nccl":
        raise InputError(
            f"--collective nccl, both ranks on one card: {ALONE}. Use auto, ipc or host, or --devices 0,1."
        )
    environment = {MAILBOX_DOOR: ""}  # a test's fault is for the ranks
    if cards:
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(visible)}
    places = [str(visible.index(card)) for card in cards] or ["0", "1"]
    start = run or (lambda arguments, limit: run_twins(PROBE, places, arguments, limit, environment))
    left = [transport for transport in TRANSPORTS if wish in ("auto", transport) or transport == "nccl"]
    verdicts: dict[str, Verdict] = {}
    if together:
        left.remove("nccl")
        verdicts["nccl"] = Verdict("nccl", ALONE)
    while left:
        switches = [TRUSTED] if wish == "ipc" else []
        switches += [TOGETHER] if together else []
        switches += [DISTRUSTED] if _failed(verdicts.get("ipc")) else []
        verdicts |= {verdict.transport: verdict for verdict in judge(left, start([*left, *switches], seconds))}
        left = [transport for transport in left if transport not in verdicts]
    return _decide(wish, verdicts)


def _failed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.fault is not None


def judge(transports: Sequence[str], heard: Sequence[Heard]) -> list[Verdict]:
    """A verdict on every transport that both children tried, and on the first that they did not come back from.

    Always at least one: whatever happens, the next run has less to try.
    """
    verdicts = []
    for transport in transports:
        finds = [next((line for line in one.lines if line.get("tried") == transport), None) for one in heard]
        if None in finds:
            verdicts.append(Verdict(transport, _silence(transport, heard)))
            break
        faults = "; ".join(dict.fromkeys(str(find["fault"]) for find in finds if find and find.get("fault")))
        times = [float(find["microseconds"]) for find in finds if find and find.get("microseconds")]
        tables = [find["large"] for find in finds if find and find.get("large")]
        large = {int(size): max(float(table[size]) for table in tables) for size in (tables[0] if tables else ())}
        note = next((str(find["note"]) for find in finds if find and find.get("note")), None)
        verdicts.append(Verdict(transport, faults or None, max(times) if times else None, large, note))
    return verdicts


def _silence(transport: str, heard: Sequence[Heard]) -> str:
    for rank, one in enumerate(heard):
        if not any(line.get("tried") == transport for line in one.lines):
            if one.exit_code is None:
                return f"rank {rank}'s trial hung"
            last = one.errors.splitlines()[-1] if one.errors else "no word"
            return f"rank {rank}'s trial ended with exit code {one.exit_code}: {last}"
    return "no answer"


def _decide(wish: Wish, verdicts: dict[str, Verdict]) -> Choice:
    found = tuple(verdicts[transport] for transport in TRANSPORTS if transport in verdicts)
    told = "; ".join(map(str, found))
    good = {verdict.transport: verdict for verdict in found if verdict.fault is None}
    small: str
    if wish != "auto":
        if wish not in good:
            raise EnvironmentFault(f"--collective {wish}: {told}. Try --collective auto.")
        small = wish
    elif mailboxes := [verdict for name, verdict in good.items() if name != "nccl"]:
        small = min(mailboxes, key=lambda verdict: verdict.microseconds or 0.0).transport
    elif "nccl" in good:
        small = "nccl"
    else:
        raise EnvironmentFault(f"the ranks cannot exchange data: {told}.")
    nccl_from = None
    if small != "nccl" and "nccl" in good:
        nccl_from = _faster_from(good["nccl"].large, good[small].large)
    times = good[small].large if nccl_from is None else good["nccl"].large
    slow = bool(times) and times[max(times)] > SLOW * max(times)
    return Choice(cast(Small, small), nccl_from, not _failed(verdicts.get("ipc")), found, slow)


def _faster_from(nccl: dict[int, float], mailbox: dict[int, float]) -> int | None:
    """The bytes from which NCCL is clearly the faster one at every size measured; None if it is not at the largest.

    Its kernels take processors from what computes beside them, which a measurement of it alone does not show.
    """
    found = None
    for size in sorted(nccl.keys() & mailbox.keys(), reverse=True):
        if nccl[size] > CLEARLY * mailbox[size]:
            break
        found = size
    return found
