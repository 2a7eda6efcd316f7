"""What an evaluation of a server leaves, and two of them beside each other."""

import datetime
import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ... import __version__
from ...checkpoint.errors import InputError, one_line
from ..counts import Count

FORMAT = "duovolt-eval-1"
MAX_BYTES = 64 << 20
CHANCE = 0.05  # p below which a difference is called one


class Outcome(msgspec.Struct, frozen=True):
    """One question. `digest` is its own, `tokens` those of the answer, thoughts and all (0 where the server does not say)."""

    id: str
    kind: str
    digest: str
    passed: bool
    why: str
    tokens: Count


class TextScore(msgspec.Struct, frozen=True):
    """Held-out text under a server. `windows`: nats of each; `digest` of how the text was cut into windows and tokens."""

    nats: float
    tokens: Count
    bytes: Count
    windows: list[float]
    digest: str

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        return math.exp(min(700.0, self.nats / self.tokens))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


class CoarseDivergence(msgspec.Struct, frozen=True):
    """See perf.served_divergence. `seen`: mean share of the reference's probability that is on tokens both name."""

    mean: float
    largest: float
    agreement: float
    seen: float
    tokens: Count
    reference: str


class Result(msgspec.Struct, frozen=True):
    """`server`: facts it told; `sandbox`: how code was confined; `skipped`: what was left out, and why."""

    date: str
    version: str
    model: str
    server: dict[str, str]
    settings: dict[str, str]
    text: TextScore | None = None
    divergence: CoarseDivergence | None = None
    graded: list[Outcome] = []
    sandbox: str = ""
    skipped: list[str] = []
    format: str = FORMAT


def now() -> tuple[str, str]:
    """(date, version) of a result."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), __version__


def write_result(path: Path, result: Result) -> None:
    """In one step: what stood there stays whole until then. Raises OSError."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    new.replace(path)


def read_result(path: Path) -> Result:
    """Raises InputError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}.") from None
    try:
        found = msgspec.json.decode(raw[:MAX_BYTES], type=Result)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InputError(f"{path}: no result of `duovolt eval --url --out`: {one_line(error)}.") from None
    if found.format != FORMAT:
        raise InputError(f"{path}: format {one_line(ValueError(found.format))[:40]}, expected {FORMAT}.")
    text = found.text
    if text is not None and not (text.tokens > 0 and text.bytes > 0 and math.isfinite(text.nats)):
        raise InputError(f"{path}: text: counts and nats are not those of a measurement.")
    return found


def two_sided(fewer: int, more: int) -> float:
    """Exact sign test, which for paired right and wrong answers is McNemar's: the probability of a split at least this
    uneven if either side were as likely, 2 * sum_{i <= min} C(n, i) / 2^n, at most 1.
    """
    count, least = fewer + more, min(fewer, more)
    return min(1.0, 2 * sum(math.comb(count, number) for number in range(least + 1)) / 2**count)


class Paired(msgspec.Struct, frozen=True):
    """Questions that both runs were asked: right in both, in the earlier only, in the later only, in neither."""

    both: int
    lost: list[str]
    gained: list[str]
    neither: int

    @property
    def p(self) -> float:
        return two_sided(len(self.lost), len(self.gained))

    @property
    def worse(self) -> bool:
        """More was lost than gained, by more than chance explains."""
        return len(self.lost) > len(self.gained) and self.p < CHANCE


def pair(before: Iterable[Outcome], after: Iterable[Outcome]) -> Paired:
    """Only questions of the same digest are paired."""
    earlier = {(one.id, one.digest): one for one in before}
    pairs = [(earlier[one.id, one.digest], one) for one in after if (one.id, one.digest) in earlier]
    return Paired(
        sum(a.passed and b.passed for a, b in pairs),
        [a.id for a, b in pairs if a.passed and not b.passed],
        [a.id for a, b in pairs if b.passed and not a.passed],
        sum(not a.passed and not b.passed for a, b in pairs),
    )
