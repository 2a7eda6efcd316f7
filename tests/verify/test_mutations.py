"""Thousands of random damages to converted and rank directories: every one is found, none makes a traceback.

Each damage is done in place and undone after; a seed stands in every failure's message. Damages whose name ends in
`, signed` make every digest fit what lies there: only the comparison with the stage before can find them.
"""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.verify.mutations import AGAINST_THE_SOURCE, KINDS, World
from duovolt.verify.proofs import verify

EACH = 70  # damages of each kind


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("mutations"))
    config = maker.config(
        num_hidden_layers=1, full_attention_interval=1, vocab_size=64, mtp_num_hidden_layers=0
    ) | {"vision_config": None}  # fmt: skip
    source = maker.quantised_source(world.source, config)
    maker.converted(world.converted, config, max_shard_bytes=40_000, source_files=source)
    shard(world.converted, world.ranks, 2)
    maker.converted(world.base / "old", config, max_shard_bytes=40_000, note="old", words=maker.row_marker)
    shard(world.base / "old", world.base / "old-ranks", 2)
    return world


def contents(world: World) -> dict[Path, bytes]:
    return {p: p.read_bytes() for place in (world.converted, world.ranks) for p in place.rglob("*") if p.is_file()}


def restore(world: World, sound: dict[Path, bytes]) -> None:
    there = contents(world)
    for path in there.keys() - sound.keys():
        path.unlink()
    for path, data in sound.items():
        if there.get(path) != data:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)


def is_found(world: World, with_source: bool) -> bool:
    """False if every proof holds. A directory that has lost its manifest is refused as unfinished."""
    try:
        source = world.source if with_source else None
        return not verify(source=source, converted=world.converted, ranks=world.ranks).ok
    except InputError as error:
        return "unfinished" in str(error)


@pytest.mark.timeout(900)  # half a minute on an idle core, minutes on a busy one
def test_every_damage_is_found(world: World) -> None:
    sound = contents(world)
    assert verify(source=world.source, converted=world.converted, ranks=world.ranks).ok
    missed: list[str] = []
    table: Counter[str] = Counter()
    started = time.monotonic()
    for kind in KINDS:
        name = kind.__name__.replace("_", " ").replace(" signed", ", signed")
        done = 0
        for seed in range(4 * EACH):
            if done == EACH:
                break
            what = kind(world, random.Random(f"{name} {seed}"))
            if what is not None:
                done += 1
                if is_found(world, kind in AGAINST_THE_SOURCE):
                    table[name] += 1
                else:
                    missed.append(f"{name}, seed {seed}: {what}")
            restore(world, sound)
        assert done == EACH, f"{name}: only {done} of {4 * EACH} dice did anything"
    for name, count in table.items():
        print(f"{name:32} {count:4} of {EACH} found")
    total = EACH * len(KINDS)
    print(f"{'all':32} {table.total():4} of {total} found in {time.monotonic() - started:.1f} s")
    assert not missed and table.total() == total >= 2000, missed[:10]
    assert contents(world) == sound and verify(converted=world.converted, ranks=world.ranks).ok


def test_no_damage_makes_a_traceback(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line: an exit code of 1 or 2 and messages, never 'unexpected'."""
    sound = contents(world)
    for number, kind in enumerate(KINDS * 2):
        what = kind(world, random.Random(number))
        if what is not None:
            arguments = ["--source", world.source] if kind in AGAINST_THE_SOURCE else []
            code = main(
                ["verify", "--ranks", str(world.ranks), "--converted", str(world.converted), *map(str, arguments)]
            )
            captured = capsys.readouterr()
            assert code in (1, 2), f"{number}: {what}: exit code {code}"
            assert captured.err.startswith("duovolt: ") and "unexpected" not in captured.err, captured.err
            assert "Traceback" not in captured.out + captured.err
        restore(world, sound)
