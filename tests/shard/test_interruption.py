"""kill -9 at any write, then the same command again: the result is that of an unbroken run."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.forks import Commands

COMMANDS = Commands("shard")


@pytest.fixture(scope="module", autouse=True)
def commands() -> Iterator[None]:
    yield
    COMMANDS.close()


def run(converted: Path, ranks: Path, **doors: str) -> int:
    words = ["shard", str(converted), str(ranks), "--tp", "2", "--quiet"]
    return COMMANDS.run(words, converted.parent, **doors).returncode


def contents(ranks: Path) -> dict[str, bytes]:
    return {str(p.relative_to(ranks)): p.read_bytes() for p in ranks.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interrupted") / "converted"
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=0)
    maker.converted(path, config, max_shard_bytes=60_000)
    return path


def test_killed_at_sampled_writes(converted: Path, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    assert run(converted, tmp_path / "unbroken", DUOVOLT_COUNT_WRITES=str(counter)) == 0
    wanted, writes = contents(tmp_path / "unbroken"), int(counter.read_text())
    assert writes > 100
    # Spread over the run, and the last few: manifest, journal and lock of each rank.
    for stop in sorted({*range(1, writes, writes // 9), writes - 5, writes - 1, writes}):
        ranks = tmp_path / f"killed-{stop}"
        assert run(converted, ranks, DUOVOLT_STOP_AT_WRITE=str(stop)) == -signal.SIGKILL
        assert contents(ranks) != wanted or stop > writes - 5
        assert run(converted, ranks) == 0
        assert contents(ranks) == wanted, f"killed at write {stop} of {writes}"


def test_a_second_kill_while_resuming(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "unbroken", 2)
    for stop in ("90", "40", "70"):
        run(converted, tmp_path / "ranks", DUOVOLT_STOP_AT_WRITE=stop)
    assert run(converted, tmp_path / "ranks") == 0
    assert contents(tmp_path / "ranks") == contents(tmp_path / "unbroken")


def test_a_file_damaged_between_the_runs_is_written_again(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "unbroken", 2)
    wanted = contents(tmp_path / "unbroken")
    ranks = tmp_path / "ranks"
    assert run(converted, ranks, DUOVOLT_STOP_AT_WRITE="120") == -signal.SIGKILL
    done = sorted(ranks.rglob("model-*.safetensors"))
    assert done
    raw = bytearray(done[0].read_bytes())
    raw[-1] ^= 1
    done[0].write_bytes(raw)
    report = shard(converted, ranks, 2)
    assert done[0].name not in report.ranks[int(done[0].parent.name.split("-")[1])].resumed
    assert contents(ranks) == wanted


def test_another_conversion_does_not_resume(converted: Path, tmp_path: Path) -> None:
    """O02: the source changed in between."""
    assert run(converted, tmp_path / "ranks", DUOVOLT_STOP_AT_WRITE="60") == -signal.SIGKILL
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=0)
    maker.converted(tmp_path / "other", config, max_shard_bytes=60_000, note="other")
    assert run(tmp_path / "other", tmp_path / "ranks") == 2
