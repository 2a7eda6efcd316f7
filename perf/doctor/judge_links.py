"""What lies between two cards, and what becomes of them when both are hot, judged."""

from collections.abc import Iterator

from .facts import Card, Facts, Finding, Link, Load, Sample, Way

_FAST_US = 15.0  # there and back between cards that write into one another's memory
_LOST_SHARE = (
    0.7  # of the clock at the start, below which a power limit counts: all products heat more than decode does
)
_HOT = frozenset({"thermal", "hardware thermal", "hardware slowdown"})
_IOMMU_REMEDY = "boot with iommu=pt (or intel_iommu=off), and switch ACS off in the BIOS"


def judge_links(facts: Facts) -> Iterator[Finding]:
    """IOMMU, NVLink, and the tested way between each pair."""
    if len(facts.cards) > 1:
        yield from _iommu(facts.cards)
        yield from _nvlink(facts.cards)
    for link in facts.links:
        yield from _link(link, facts)
    if facts.load is not None:
        yield from _load(facts.cards, facts.load)


def translated(cards: list[Card]) -> list[str]:
    """IOMMU group types under which stores between cards have been seen to vanish."""
    return sorted({card.iommu for card in cards if card.iommu and card.iommu.upper().startswith("DMA")})


def _iommu(cards: list[Card]) -> Iterator[Finding]:
    found = translated(cards)
    if found and all(card.nvlinks for card in cards):
        yield Finding("good", "IOMMU", f"group type {', '.join(found)}, which NVLink does not pass through")
    elif found:
        yield Finding(
            "limited", "IOMMU", f"translates the cards' addresses (group type {', '.join(found)}): "
            "peer access is not trusted, the ranks meet in host memory", _IOMMU_REMEDY,
        )  # fmt: skip
    else:
        kinds = sorted({card.iommu for card in cards if card.iommu})
        yield Finding("good", "IOMMU", f"group type {', '.join(kinds)}" if kinds else "off")


def _nvlink(cards: list[Card]) -> Iterator[Finding]:
    counts = [card.nvlinks or 0 for card in cards]
    if min(counts) > 0:
        yield Finding("good", "NVLink", f"{', '.join(map(str, counts))} links up")
    elif max(counts) > 0:
        lame = ", ".join(f"GPU {card.index}" for card in cards if not card.nvlinks)
        yield Finding("limited", "NVLink", f"none up on {lame}", "look at the bridge, or at the board's seat")
    else:
        yield Finding(
            "limited", "NVLink", "none: the ranks exchange over PCIe",
            "nothing to repair; a pair of SXM2 cards on one board has it. Decode loses a few ms a round, prefill more",
        )  # fmt: skip


def _link(link: Link, facts: Facts) -> Iterator[Finding]:
    about = f"GPU {link.first} - GPU {link.second}"
    if link.host is None or not link.host.right:
        yield Finding(
            "broken", about, f"words through pinned host memory do not arrive ({link.fault or 'wrong words'})",
            "two ranks cannot run; see `dmesg` for Xid errors, and test each card alone",
        )  # fmt: skip
    else:
        yield Finding("good", about, f"through host memory: {_way(link.host)}")
    if link.claimed is False:
        yield Finding(
            "limited", about, "the driver offers no peer access: the ranks meet in host memory",
            "normal for some boards; else both cards under one PCIe root, or NVLink",
        )  # fmt: skip
        return
    if link.there is None or link.back is None:
        yield Finding(
            "limited", about, f"stores into one another's memory have no result ({link.fault or 'not tested'}): "
            "the ranks meet in host memory", _IOMMU_REMEDY,
        )  # fmt: skip
        return
    if not (link.there.right and link.back.right):
        ways = [name for name, way in (("there", link.there), ("back", link.back)) if not way.right]
        yield Finding(
            "limited", about, f"the driver claims peer access, but stores do not arrive ({' and '.join(ways)}): "
            "the ranks meet in host memory", _IOMMU_REMEDY,
        )  # fmt: skip
        return
    text = f"stores into one another's memory: {_way(link.there)}; the other way {_way(link.back)}"
    slow = max(link.there.round_trip_us or 0.0, link.back.round_trip_us or 0.0)
    host = link.host.round_trip_us if link.host is not None else None
    if slow > _FAST_US and host is not None and slow > host:
        yield Finding("limited", about, f"{text}: slower than host memory, which the ranks use instead", _IOMMU_REMEDY)
    else:
        yield Finding("good", about, text)


def _way(way: Way) -> str:
    parts = []
    if way.round_trip_us is not None:
        parts.append(f"{way.round_trip_us:.1f} us a round trip")
    if way.rate is not None:
        parts.append(f"{way.rate / 1e9:.1f} GB/s")
    return ", ".join(parts) or "right"


def _load(cards: list[Card], load: Load) -> Iterator[Finding]:
    if not cards:
        yield Finding(
            "broken", "load", "there is no card to keep at work", "leave --load out, or see to the cards first"
        )
        return
    if load.fault is not None:
        yield Finding(
            "broken", "load", f"it ended early: {load.fault}", "see `dmesg` for Xid errors; test each card alone"
        )
    for card, samples in zip(cards, load.samples, strict=True):
        if len(samples) < 3:
            yield Finding(
                "limited",
                f"GPU {card.index}",
                "no clocks could be read under load",
                "pip install nvidia-ml-py, and run again",
            )
        else:
            yield _heated(card, samples, load.seconds, len(cards))


def _heated(card: Card, samples: list[Sample], seconds: float, count: int) -> Finding:
    third = max(1, len(samples) // 3)
    early = [sample.clock for sample in samples[:third] if sample.clock is not None]
    late = [sample.clock for sample in samples[-third:] if sample.clock is not None]
    hottest = max((sample.temperature for sample in samples if sample.temperature is not None), default=None)
    reasons = sorted({reason for sample in samples for reason in sample.slowed})
    together = f"{count} cards at work for {seconds:.0f} s" if count > 1 else f"at work for {seconds:.0f} s"
    text = together
    if early and late:
        text += f": {max(early)} MHz at the start, {min(late)} at the end"
    if hottest is not None:
        text += f", up to {hottest} C"
    if reasons:
        text += f", held back by {', '.join(reasons)}"
    generation = max((sample.pcie for sample in samples if sample.pcie is not None), default=None)
    if generation is not None and card.pcie_most is not None and generation < card.pcie_most:
        text += f", PCIe generation {generation} of {card.pcie_most} even at work"
    slowed = bool(early and late) and min(late) < _LOST_SHARE * max(early)
    if _HOT & set(reasons):
        return Finding(
            "limited", f"GPU {card.index}", text,
            f"it throttles by heat: more air, or a lower limit (`nvidia-smi -i {card.index} -pl WATTS`) that it can hold",
        )  # fmt: skip
    if slowed:
        return Finding(
            "limited", f"GPU {card.index}", text,
            "decode waits for memory and loses little, prefill loses as much as the clock: look at cables, limit and air",
        )  # fmt: skip
    return Finding("good", f"GPU {card.index}", text)
