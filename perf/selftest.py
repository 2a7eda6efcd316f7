"""What the owner of a card runs once and may send back: right answers, choices that suit it, its curve, a slice of the 27B.

The report holds no content of any model, no names of hosts or users, no paths, serial numbers or addresses: `Report` lists
all that it holds, and texts from libraries go through `without_places`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ..checkpoint.errors import DuovoltError, InputError, one_line
from ..kernels.module import arches_for, forced_arch
from ..kernels.tuning import Choice, using
from . import collective
from .curve import READ, Curve
from .curve_measure import Wanted, measure_curve
from .doctor.facts import Facts, Probes, examine
from .kernels import loadable
from .kernels_tune import tune
from .known_answers import Answer, answers_of_torch, answers_on
from .machine import Machine, read_machine
from .selftest_slice import SliceRow, measure_slice

FORMAT = "duovolt-selftest-1"
MOST_BYTES = 4 << 20  # of a file
KERNELS = (READ, "nvfp4", "fp8", "half")
_PLACE = re.compile(r"(?:\b[A-Za-z]:\\|(?<!\w)~?/)[^\s'\",;:)]+")
_UUID = re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
Tell = Callable[[str], None]
Result = TypeVar("Result")


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `kernels tune` would keep for this card, and its mean microseconds."""

    choice: Choice
    microseconds: float


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between two cards: microseconds by way (ipc, host, nccl), the slower rank's."""

    message: str
    microseconds: dict[str, float]


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. `missing`: what could not be done, and why. `machine` None: no card."""

    facts: Facts
    machine: Machine | None
    answers: list[Answer]
    tuned: Tuned | None
    curve: Curve | None
    slice: list[SliceRow]
    missing: list[str]
    exchanges: list[Exchange] = []
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}, expected {FORMAT!r}")
        if self.facts.load is not None and len(self.facts.load.samples) != len(self.facts.cards):
            raise ValueError("a load needs samples of every card")

    @property
    def wrong(self) -> list[Answer]:
        """Answers that are not as they must be."""
        return [answer for answer in self.answers if not answer.right]

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def selftest(probes: Probes, tell: Tell, quick: bool = False) -> Report:
    """Everything that this machine can do; `tell` gets a line a step. `quick`: answers only."""
    tell("machine and links")
    facts = without_names(examine(probes))
    tell("answers of torch on this CPU")
    answers = answers_of_torch()
    missing: list[str] = []
    if not facts.cards or not torch.cuda.is_available():  # of a driver that hangs torch is not asked
        missing.append(
            f"no card answers to torch ({facts.reason or 'see the doctor'}): kernels, curve and slice are not tested"
        )
        return Report(facts, None, answers, None, None, [], missing)
    device = torch.device("cuda", torch.cuda.current_device())
    machine = read_machine(device)
    answers += _on_card(device, missing, tell)
    if quick:
        missing.append("only answers were asked for")
        return Report(facts, machine, answers, None, None, [], missing)
    tuned = _attempt("choices that suit the card", lambda: _tuned(device, tell), missing, tell)
    with using(Choice() if tuned is None else tuned.choice):
        wanted = Wanted(KERNELS, steps=1, variations=False)
        curve = _attempt("bandwidth", lambda: measure_curve(device, wanted, tell), missing, tell)
        rows = _attempt("a slice of the 27B", lambda: measure_slice(device, tell), missing, tell)
    exchanges: list[Exchange] | None = []
    if torch.cuda.device_count() > 1:
        exchanges = _attempt("exchanges between two cards", lambda: _exchanges(missing), missing, tell)
    else:
        missing.append("exchanges: two cards are needed")
    return Report(facts, machine, answers, tuned, curve, rows or [], missing, exchanges or [])


def read_report(path: Path) -> Report:
    """From its file. Raises InputError for one that is damaged, another format's, or too large."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MB; a report of `duovolt selftest` is small.")
    try:
        report = msgspec.json.decode(content, type=Report)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path}: not a report of `duovolt selftest`: {one_line(error)}.") from None
    if _holds_too_large(msgspec.to_builtins(report)):
        raise InputError(f"{path}: not a report of `duovolt selftest`: a whole number of more than 64 bits.")
    return report


def _holds_too_large(found: object) -> bool:
    """A whole number that no float could be made of."""
    if isinstance(found, dict | list | tuple):
        return any(map(_holds_too_large, found.values() if isinstance(found, dict) else found))
    return isinstance(found, int) and abs(found) >= 1 << 64


def without_places(text: str) -> str:
    """A library's text without paths and identities."""
    return _PLACE.sub("PLACE", _UUID.sub("ID", text))


def without_names(facts: Facts) -> Facts:
    """Facts as they may be sent: no bus addresses, no paths in texts."""
    replace = msgspec.structs.replace

    def clean(text: str | None) -> str | None:
        return None if text is None else without_places(text)

    return replace(
        facts,
        reason=clean(facts.reason),
        cards=[replace(card, pci="") for card in facts.cards],
        software=replace(facts.software, nvrtc_fault=clean(facts.software.nvrtc_fault)),
        links=[replace(link, fault=clean(link.fault)) for link in facts.links],
    )


def _on_card(device: torch.device, missing: list[str], tell: Tell) -> list[Answer]:
    """With the card's own build, and on a newer card with the PTX that a V100's code comes from."""
    found: list[Answer] = []
    able = _attempt("builds of the kernels", lambda: loadable(device), missing, tell) or []
    for arch in able:
        tell(f"answers of {arch}")
        with forced_arch(arch):
            found += [
                answer if answer.fault is None else msgspec.structs.replace(answer, fault=without_places(answer.fault))
                for answer in answers_on(device, arch)
            ]
    missing += [
        f"{arch}: cannot be built here"
        for arch in arches_for(torch.cuda.get_device_capability(device))
        if arch not in able
    ]
    return found


def _tuned(device: torch.device, tell: Tell) -> Tuned:
    best = tune(device, tell)
    return Tuned(best.chosen, best.microseconds)


def _exchanges(missing: list[str]) -> list[Exchange]:
    """Every message of `bench collective`; a way that failed is noted."""
    found = collective.measure(collective.WAYS)
    missing += [f"exchange, {way}: {without_places(why)[:300]}" for way, why in found.missing.items()]
    return [Exchange(row.message.strip(), row.microseconds) for row in found.rows]


def _attempt(what: str, step: Callable[[], Result], missing: list[str], tell: Tell) -> Result | None:
    """One step; its failure is noted, and the rest goes on."""
    tell(what)
    try:
        return step()
    except (DuovoltError, RuntimeError) as fault:
        missing.append(f"{what}: {without_places(one_line(fault))[:300]}")
        return None
