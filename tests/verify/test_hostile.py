"""Manifests that lie, each sealed again with a sound digest: never accepted, never another exception than ours."""

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duovolt.checkpoint.directory import MANIFEST
from duovolt.checkpoint.errors import CheckFailed, DuovoltError
from duovolt.checkpoint.manifest import Manifest, read_manifest
from duovolt.cli import inspect, plan
from duovolt.cli.dequantize import _whole_manifest, tensors_of
from duovolt.convert.dequantize import write_plain
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.model_source import sheet_at
from duovolt.runtime.engine.sources import open_source
from duovolt.runtime.engine.weights import load_weights
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.verify.proofs import verify

NUMBERS = [0, 1, -1, 3, 2**40, 2**62]
WORDS = ["", "x", "canonical", "v100-fp8", "v100-scale", "v100-nvfp4", "nvfp4", "fp8_e4m3", "bf16", "plain", "words",
         "row_scale", "global_scale", "U8", "F32", "BF16", "I64"]  # fmt: skip
LISTS: list[Any] = [[], [1], [2**40, 2**40], [[0, 2**40]], [[5, 3]], [[-1, 3]]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything below a JSON value."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def lie(value: dict[str, Any], rng: random.Random) -> str:
    """Change one place of a manifest."""
    path = rng.choice([p for p in places(value) if p[0] != "digest"])
    parent: Any = value
    for key in path[:-1]:
        parent = parent[key]
    old = parent[path[-1]]
    if isinstance(old, int):
        new: Any = rng.choice(NUMBERS)
    elif isinstance(old, str):
        new = rng.choice(WORDS)
    elif isinstance(old, list):
        new = rng.choice([*LISTS, old * 2, old[1:]])
    else:
        new = rng.choice([None, 0, {}])
    parent[path[-1]] = new
    return f"{path}: {old!r} -> {new!r}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hostile")
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, vocab_size=64) | {"vision_config": None}
    maker.converted(base / "converted", config)
    shard(base / "converted", base / "ranks", 2)
    return base


def forge(directory: Path, seed: int) -> tuple[str, bytes] | None:
    """Lie in a manifest and seal it; what was changed and the old bytes, None if the lie is not even well-formed."""
    path = directory / MANIFEST
    before = path.read_bytes()
    value = msgspec.json.decode(msgspec.json.encode(read_manifest(directory)))
    what = lie(value, random.Random(seed))
    try:
        forged = msgspec.json.decode(msgspec.json.encode(value), type=Manifest).sealed().encode()
    except msgspec.ValidationError:
        return None
    if forged == before:
        return None
    path.write_bytes(forged)
    return f"seed {seed}: {what}", before


def test_lies_of_a_rank(made: Path) -> None:
    directory, tried = made / "ranks" / "rank-1-of-2", 0
    for seed in range(200):
        if (forged := forge(directory, seed)) is None:
            continue
        tried += 1
        with suppress(DuovoltError):
            assert not verify(ranks=made / "ranks").ok, forged[0]
        (directory / MANIFEST).write_bytes(forged[1])
    assert tried > 80 and verify(ranks=made / "ranks").ok


def test_lies_of_a_converted_directory(made: Path, tmp_path: Path) -> None:
    """`shard` either refuses or makes ranks that `verify` refuses beside the true directory."""
    tried = 0
    shutil.copytree(made / "converted", tmp_path / "true")
    for seed in range(200):
        if (forged := forge(made / "converted", seed)) is None:
            continue
        tried += 1
        with suppress(DuovoltError):
            shard(made / "converted", tmp_path / "out", 2)
            assert not verify(converted=tmp_path / "true", ranks=tmp_path / "out").ok, forged[0]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (made / "converted" / MANIFEST).write_bytes(forged[1])
    assert tried > 80


def test_lies_to_dequantize(made: Path, tmp_path: Path) -> None:
    """Refused with one message, or decoded: never an exception of another kind, never a huge allocation."""
    tried = 0
    for seed in range(300):
        if (forged := forge(made / "converted", seed)) is None:
            continue
        tried += 1
        with suppress(DuovoltError):
            tensors, _, _ = tensors_of(made / "converted", "F32")
            write_plain(tensors, {}, tmp_path / "out", lambda count: None, "test")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (made / "converted" / MANIFEST).write_bytes(forged[1])
    assert tried > 120


@pytest.mark.parametrize("place", ["converted", "ranks/rank-1-of-2"])
def test_lies_to_those_who_only_read(made: Path, place: str) -> None:
    directory, tried = made / place, 0
    readers = [
        lambda: inspect.facts(directory),
        lambda: plan.facts(directory, None, 2, None, "int8"),
        lambda: ledger_of(sheet_at(str(directory), None, None), Shape(100, 3, 1, "int8")),
        lambda: load_weights(open_source(directory)),
    ]
    for seed in range(300):
        if (forged := forge(directory, seed)) is None:
            continue
        tried += 1
        for read in readers:
            with suppress(DuovoltError):
                read()
        (directory / MANIFEST).write_bytes(forged[1])
    assert tried > 120


def test_a_tensor_that_is_not_the_familys_is_not_joined(made: Path) -> None:
    with pytest.raises(CheckFailed, match="which the family does not have"):
        _whole_manifest(read_manifest(made / "ranks" / "rank-0-of-2"), {})
