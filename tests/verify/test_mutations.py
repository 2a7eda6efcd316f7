"""Random damage to a directory of ranks: every one is found, none makes a traceback.

Each damage is done in place and undone after; a seed stands in every failure's message.
"""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.container import TensorEntry, read_header
from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.verify.proofs import verify

DAMAGES = 560


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("mutations")
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, vocab_size=64) | {"vision_config": None}
    maker.converted(base / "converted", config, max_shard_bytes=60_000)
    shard(base / "converted", base / "ranks", 2)
    return base / "ranks"


def some_file(ranks: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(p for p in ranks.rglob("*") if p.is_file()))


def flip_bits(ranks: Path, rng: random.Random) -> str:
    path = some_file(ranks, rng)
    raw = bytearray(path.read_bytes())
    at = [rng.randrange(len(raw)) for _ in range(rng.choice([1, 1, 1, 2]))]
    before = bytes(raw)
    for position in at:
        raw[position] ^= 1 << rng.randrange(8)
    if bytes(raw) == before:  # the same bit twice
        raw[at[0]] ^= 1
    path.write_bytes(raw)
    return f"bits at {at} of {path}"


def flip_header(ranks: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(ranks.rglob("*.safetensors")))
    raw = bytearray(path.read_bytes())
    at = rng.randrange(8 + int.from_bytes(raw[:8], "little"))
    raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return f"header bit at {at} of {path}"


def flip_records(ranks: Path, rng: random.Random) -> str:
    path = rng.choice([p for p in sorted(ranks.rglob("*.json")) if p.name.startswith(("duovolt", "model"))])
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return f"record bit at {at} of {path}"


def change_length(ranks: Path, rng: random.Random) -> str:
    path = some_file(ranks, rng)
    raw = path.read_bytes()
    cut = rng.randrange(len(raw))
    path.write_bytes(raw[:cut] if rng.random() < 0.5 else raw + bytes(rng.randrange(1, 100)))
    return f"length of {path}"


def remove(ranks: Path, rng: random.Random) -> str:
    path = some_file(ranks, rng)
    path.unlink()
    return f"removed {path}"


def add(ranks: Path, rng: random.Random) -> str:
    path = some_file(ranks, rng)
    path.with_name(f"extra-{path.name}").write_bytes(path.read_bytes())
    return f"added beside {path}"


def swap_tensors(ranks: Path, rng: random.Random) -> str:
    """Data of two tensors of equal size within one file."""
    path = rng.choice(sorted(ranks.rglob("*.safetensors")))
    by_size: dict[int, list[TensorEntry]] = {}
    for entry in read_header(path).tensors.values():
        by_size.setdefault(entry.nbytes, []).append(entry)
    pairs = [group for group in by_size.values() if len(group) > 1]
    raw = bytearray(path.read_bytes())
    group = rng.choice(pairs) if pairs else []
    first, second = rng.sample(group, 2) if group else (None, None)
    if first is None or second is None or raw[first.begin : first.end] == raw[second.begin : second.end]:
        return flip_bits(ranks, rng)
    raw[first.begin : first.end], raw[second.begin : second.end] = (
        raw[second.begin : second.end],
        raw[first.begin : first.end],
    )
    path.write_bytes(raw)
    return f"swapped {first.name} and {second.name} in {path}"


def swap_files(ranks: Path, rng: random.Random) -> str:
    """The same file of the two ranks."""
    path = rng.choice([*sorted((ranks / "rank-0-of-2").glob("*.safetensors")), ranks / "rank-0-of-2" / "duovolt.json"])
    other = ranks / "rank-1-of-2" / path.name
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return f"swapped {path.name} between the ranks"


def zero_block(ranks: Path, rng: random.Random) -> str:
    """A lost disk block, or a run of rubbish."""
    path = some_file(ranks, rng)
    raw = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
    start = rng.randrange(len(raw))
    block = raw[start : start + 512]
    block[:] = np.where(rng.random() < 0.5, 0, block ^ 0x5A)
    if raw.tobytes() == path.read_bytes():
        return flip_bits(ranks, rng)
    path.write_bytes(raw)
    return f"block at {start} of {path}"


KINDS: list[Callable[[Path, random.Random], str]] = [
    flip_bits, flip_bits, flip_header, flip_records, change_length, remove, add, swap_tensors, swap_files, zero_block,
]  # fmt: skip


def restore(ranks: Path, contents: dict[Path, bytes]) -> None:
    for path in ranks.rglob("*"):
        if path.is_file() and path not in contents:
            path.unlink()
    for path, data in contents.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def test_every_damage_is_found(ranks: Path) -> None:
    contents = {p: p.read_bytes() for p in ranks.rglob("*") if p.is_file()}
    assert verify(ranks=ranks).ok
    missed, found, started = [], 0, time.monotonic()
    for seed in range(DAMAGES):
        rng = random.Random(seed)
        what = KINDS[seed % len(KINDS)](ranks, rng)
        assert {p: p.read_bytes() for p in ranks.rglob("*") if p.is_file()} != contents, (
            f"seed {seed} did nothing: {what}"
        )
        try:
            if verify(ranks=ranks).ok:
                missed.append(f"seed {seed}: {what}")
            else:
                found += 1
        except InputError as error:
            assert "unfinished" in str(error), f"seed {seed}: {what}"  # the manifest itself was removed
            found += 1
        restore(ranks, contents)
    print(f"{found} of {DAMAGES} damages found in {time.monotonic() - started:.1f} s")
    assert not missed and found == DAMAGES
    assert verify(ranks=ranks).ok


def test_no_damage_makes_a_traceback(ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line: an exit code of 1 or 2 and messages, never 'unexpected'."""
    copy = tmp_path / "ranks"
    shutil.copytree(ranks, copy)
    contents = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    for seed in range(1000, 1060):
        what = KINDS[seed % len(KINDS)](copy, random.Random(seed))
        code = main(["verify", "--ranks", str(copy)])
        captured = capsys.readouterr()
        assert code in (1, 2), f"seed {seed}: {what}: exit code {code}"
        assert captured.err.startswith("duovolt: ") and "unexpected" not in captured.err, captured.err
        assert "Traceback" not in captured.out + captured.err
        restore(copy, contents)
