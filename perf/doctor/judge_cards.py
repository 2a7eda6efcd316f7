"""Cards, judged: fit for duovolt or not, sound or not, alike or not."""

import itertools
from collections.abc import Iterator

from ...kernels.libraries import VOLTA
from .facts import Card, Facts, Finding

OLDEST = (7, 0)
_ROOM_FOR_ONE = 30e9  # the 27B on one card: 22.5 GB of weights, and a cache
_ROOM_FOR_TWO = 15e9  # 12.8 GB of weights a card, and little cache
_VOLTA_CLOCKS = {877: "the SXM2 form", 1107: "the PCIe form of OEM machines, a quarter faster than the SXM2 one"}
WITHOUT_CARD = "download, plan, convert, shard, verify, dequantize, eval, and serve --backend reference, which is slow"


def judge_cards(facts: Facts) -> Iterator[Finding]:
    """Every card by itself, then as a pair."""
    if not facts.cards:
        yield _no_card(facts)
        return
    for card in facts.cards:
        yield from _judge_card(card)
    yield from _judge_pair(facts.cards)


def is_volta(facts: Facts) -> bool:
    """A V100 is among the cards, or on the bus where no driver sees it."""
    return any(card.capability == VOLTA for card in facts.cards) or any(map(is_volta_id, facts.host.pci_cards))


def is_volta_id(device: str) -> bool:
    """Of `vendor:device`: 1db0 to 1dbf, 1df0 to 1df6, and 1d81."""
    vendor, _, number = device.partition(":")
    return vendor == "10de" and (number[:3] == "1db" or number in [f"1df{n}" for n in range(7)] or number == "1d81")


def _no_card(facts: Facts) -> Finding:
    if facts.host.pci_cards:
        seen = ", ".join(facts.host.pci_cards)
        return Finding(
            "broken", "cards", f"{len(facts.host.pci_cards)} NVIDIA on the bus ({seen}), but {facts.reason}",
            "see the line about the driver; after an installation, restart",
        )  # fmt: skip
    return Finding(
        "limited", "cards", f"none: {facts.reason}", f"works here, on the CPU: {WITHOUT_CARD}"
    )  # fmt: skip


def _judge_card(card: Card) -> Iterator[Finding]:
    about = f"GPU {card.index}"
    what = ", ".join(filter(None, (
        card.name,
        None if card.memory is None else f"{card.memory / (1 << 30):.0f} GB",
        None if card.multiprocessors is None else f"{card.multiprocessors} multiprocessors",
        None if card.core_mhz is None else f"up to {card.core_mhz} MHz",
    )))  # fmt: skip
    if card.capability is None:
        yield Finding("limited", about, f"{what}: its compute capability is not told", "see the line about the driver")
    elif card.capability < OLDEST:
        yield Finding(
            "broken", about, f"{what}: compute capability {card.capability[0]}.{card.capability[1]} is too old",
            "duovolt's kernels need 7.0, a V100, or newer",
        )  # fmt: skip
    elif card.capability == VOLTA:
        yield Finding("good", about, what)
    else:
        yield Finding("good", about, f"{what}: newer than the V100 that duovolt is tuned for; it runs code of its own")
    yield from _memory(card, about)
    yield from _memory_clock(card, about)
    yield from _health(card, about)
    yield from _slot(card, about)


def _memory(card: Card, about: str) -> Iterator[Finding]:
    if card.memory is None:
        return
    if card.memory < _ROOM_FOR_TWO:
        yield Finding("broken", about, "too little memory for the 27B, even split over two", "choose a smaller model")
    elif card.memory < _ROOM_FOR_ONE:
        yield Finding(
            "limited", about, "12.8 GB of the split 27B leave little room for a cache",
            "`duovolt plan` says what context fits; a card of 32 GB fits much more",
        )  # fmt: skip
    if card.memory_free is not None and card.memory_free < 0.9 * card.memory:
        used = (card.memory - card.memory_free) / 1e9
        yield Finding(
            "limited", about, f"{used:.1f} GB of its memory are taken by {card.processes or 'other'} processes",
            "stop what else uses the card: `nvidia-smi` lists it",
        )  # fmt: skip


def _memory_clock(card: Card, about: str) -> Iterator[Finding]:
    if card.memory_mhz is None:
        yield Finding("limited", about, "its memory clock is not told", "pip install nvidia-ml-py, and run again")
        return
    paper = "" if not card.bus_bits else f", {2 * card.memory_mhz * card.bus_bits / 8e3:.0f} GB/s on paper"
    form = _VOLTA_CLOCKS.get(card.memory_mhz, "") if card.capability == VOLTA else ""
    yield Finding("good", about, f"memory at {card.memory_mhz} MHz{paper}{form and ': ' + form}")
    slow = card.memory_mhz_application
    if slow is not None and slow < card.memory_mhz:
        yield Finding(
            "limited", about, f"its memory is set to {slow} MHz and can run at {card.memory_mhz}: decode is slower by as much",
            f"nvidia-smi -i {card.index} -rac",
        )  # fmt: skip


def _health(card: Card, about: str) -> Iterator[Finding]:
    if card.uncorrected:
        yield Finding(
            "broken", about, f"{card.uncorrected} memory errors that could not be corrected",
            "results cannot be trusted: return the card, or reset its counters and watch (`nvidia-smi -q -d ECC`)",
        )  # fmt: skip
    if card.retired:
        yield Finding(
            "limited", about, f"{card.retired} memory pages are out of use",
            "a worn card: few are harmless; watch whether they become more (`nvidia-smi -q -d PAGE_RETIREMENT`)",
        )  # fmt: skip
    if card.temperature is not None and card.slowdown_temperature is not None:
        room = card.slowdown_temperature - card.temperature
        if room < 10:
            yield Finding(
                "limited", about, f"{card.temperature} C without work, {room} below where it slows down",
                "more air: an SXM2 or passive card needs a fan that blows through it",
            )  # fmt: skip


def _slot(card: Card, about: str) -> Iterator[Finding]:
    if card.lanes is None or card.lanes_most is None or card.pcie_most is None:
        return
    now = f"PCIe {card.pcie_most} x{card.lanes}"
    idle = f" (generation {card.pcie} while it rests)" if card.pcie is not None and card.pcie < card.pcie_most else ""
    if card.lanes < card.lanes_most:
        yield Finding(
            "limited", about, f"{now} of x{card.lanes_most}{idle}: loading, and exchange without NVLink, are slower",
            "another slot, or a riser with all lanes; look at how the board divides them",
        )  # fmt: skip
    else:
        yield Finding("good", about, f"{now}{idle}")


def _judge_pair(cards: list[Card]) -> Iterator[Finding]:
    if len(cards) == 1:
        grade = "good" if (cards[0].memory or 0) >= _ROOM_FOR_ONE else "limited"
        yield Finding(grade, "pair", "one card: serve one rank (`shard --tp 1`)")  # type: ignore[arg-type]
        return
    alike = any(not _differences(one, other) for one, other in itertools.combinations(cards, 2))
    for one, other in itertools.pairwise(cards):
        names = f"GPU {one.index} and GPU {other.index}"
        if unlike := _differences(one, other):
            yield Finding(
                "limited" if alike else "broken", "pair", f"{names} differ in {', '.join(unlike)}",
                "two ranks must compute the same bits at one pace, so `serve` refuses the two: choose two of a kind with "
                "--devices, or serve one rank (`shard --tp 1`)",
            )  # fmt: skip
        else:
            yield Finding("good", "pair", f"{names} are alike")


def _differences(one: Card, other: Card) -> list[str]:
    compared = {
        "name": (one.name, other.name),
        "compute capability": (one.capability, other.capability),
        "multiprocessors": (one.multiprocessors, other.multiprocessors),
        "memory clock": (one.memory_mhz, other.memory_mhz),
        "memory": (one.memory and one.memory >> 30, other.memory and other.memory >> 30),
    }
    return [f"{what} ({a} and {b})" for what, (a, b) in compared.items() if None not in (a, b) and a != b]
