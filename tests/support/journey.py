"""The directories that a checkpoint goes through, below one folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Journey:
    """A source, its conversion, and the two ranks of that."""

    base: Path

    @property
    def source(self) -> Path:
        return self.base / "source"

    @property
    def converted(self) -> Path:
        return self.base / "converted"

    @property
    def ranks(self) -> Path:
        return self.base / "ranks"

    def rank(self, number: int) -> Path:
        return self.ranks / f"rank-{number}-of-2"
