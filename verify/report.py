"""What `verify` found: one `Proof` a line, its failures, and the error table of what was quantised."""

from typing import Any, Literal

import msgspec

MAX_LISTED = 10_000  # failures kept a proof: whoever repairs wants all of them, a hostile directory has no end of them


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One difference: where, at which index of the canonical tensor, and both values as words.

    `extra`: the file does not belong where it lies.
    """

    message: str
    tensor: str | None = None
    file: str | None = None
    index: list[int] | None = None
    found: str | None = None
    expected: str | None = None
    extra: bool = False

    def __str__(self) -> str:
        place = [part for part in (self.tensor, self.file) if part]
        if self.index is not None:
            place.append(f"index {self.index}")
        values = f": {self.found}, expected {self.expected}" if self.found is not None else ""
        return f"{', '.join(place)}: {self.message}{values}" if place else f"{self.message}{values}"


class Proof(msgspec.Struct, kw_only=True):
    """One claim about the given directories. `detail` says how much was compared, or why nothing was."""

    name: str
    status: Literal["proved", "failed", "skipped"] = "proved"
    detail: str = ""
    failures: list[Failure] = msgspec.field(default_factory=list)
    failure_count: int = 0

    def fail(self, message: str, **where: Any) -> None:
        """Record a failure; beyond `MAX_LISTED` only their number."""
        self.status = "failed"
        self.failure_count += 1
        if len(self.failures) < MAX_LISTED:
            self.failures.append(Failure(message=message, **where))

    def take(self, part: "Proof") -> None:
        """Add the failures of a part of this proof that was run apart."""
        if part.failure_count:
            self.status = "failed"
            self.failure_count += part.failure_count
            self.failures += part.failures[: MAX_LISTED - len(self.failures)]


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far one quantised weight is from its source. `max_abs` in the weight's unit; `relative_l2` = |w - d| / |w|.

    `flushed`: share of the non-zero values that became zero, 0 to 1.
    """

    tensor: str
    encoding: str
    max_abs: float
    relative_l2: float
    cosine: float
    flushed: float


class Report(msgspec.Struct, kw_only=True):
    """All proofs in the order they ran; `notes` say what the given directories cannot prove."""

    proofs: list[Proof] = msgspec.field(default_factory=list)
    errors: list[ErrorRow] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def failed(self) -> list[Proof]:
        return [proof for proof in self.proofs if proof.status == "failed"]

    @property
    def ok(self) -> bool:
        """True if no proof failed."""
        return not self.failed

    def begin(self, name: str) -> Proof:
        """A new proof, held to be true until it fails."""
        proof = Proof(name=name)
        self.proofs.append(proof)
        return proof

    def skip(self, name: str, why: str) -> None:
        """Record a proof that could not run."""
        self.proofs.append(Proof(name=name, status="skipped", detail=why))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"ok": self.ok, **msgspec.to_builtins(self)}


def describe_errors(rows: list[ErrorRow]) -> list[str]:
    """One line an encoding: the worst of each measure, with the tensor that has the worst relative L2."""
    lines = []
    for encoding in sorted({row.encoding for row in rows}):
        mine = [row for row in rows if row.encoding == encoding]
        worst = max(mine, key=lambda row: row.relative_l2)
        lines.append(
            f"{encoding}: {len(mine)} tensors against the source: relative L2 up to {worst.relative_l2:.5f} "
            f"({worst.tensor}), cosine from {min(row.cosine for row in mine):.6f}, "
            f"largest difference {max(row.max_abs for row in mine):.4g}, "
            f"at most {max(row.flushed for row in mine):.3%} of the non-zero values became zero"
        )
    return lines
