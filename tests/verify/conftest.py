"""A converted directory and its two ranks, made once; each test damages a copy."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from duovolt.shard.split import shard
from duovolt.tests.support import maker


@dataclass(frozen=True)
class Stages:
    """Paths of one conversion and its ranks."""

    converted: Path
    ranks: Path

    def rank(self, number: int) -> Path:
        return self.ranks / f"rank-{number}-of-2"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    base = tmp_path_factory.mktemp("pristine")
    maker.converted(base / "converted", maker.config(), max_shard_bytes=200_000)
    shard(base / "converted", base / "ranks", 2)
    return Stages(base / "converted", base / "ranks")


@pytest.fixture
def stages(pristine: Stages, tmp_path: Path) -> Stages:
    """A private copy."""
    shutil.copytree(pristine.converted, tmp_path / "converted")
    shutil.copytree(pristine.ranks, tmp_path / "ranks")
    return Stages(tmp_path / "converted", tmp_path / "ranks")
