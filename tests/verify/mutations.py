"""Random damages to converted and rank directories, each done in place; its text says what was done, None if nothing was.

Those whose name ends in `_signed` make every digest fit what lies there.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from duovolt.checkpoint.container import TensorEntry, read_header
from duovolt.checkpoint.directory import INDEX, MANIFEST
from duovolt.checkpoint.manifest import Manifest, read_manifest
from duovolt.shard.split import shard
from duovolt.tests.support.damage import edit_manifest, refit
from duovolt.tests.support.journey import Journey
from duovolt.tests.verify.test_hostile import lie


@dataclass(frozen=True)
class World(Journey):
    """A quantised source, its conversion, two ranks; and ranks of another conversion of equal shapes."""

    def some_directory(self, rng: random.Random) -> Path:
        return rng.choice([self.converted, self.rank(0), self.rank(1)])

    def some_file(self, rng: random.Random) -> Path:
        return rng.choice(sorted(self.some_directory(rng).iterdir()))

    def some_shard(self, rng: random.Random) -> Path:
        return rng.choice(sorted(self.some_directory(rng).glob("*.safetensors")))


def changed(path: Path, change: Callable[[bytearray], object]) -> bool:
    """Change a file's bytes; False if they are what they were."""
    raw = bytearray(path.read_bytes())
    before = bytes(raw)
    change(raw)
    path.write_bytes(raw)
    return bytes(raw) != before


def flip(raw: bytearray, first: int, last: int, rng: random.Random) -> None:
    raw[rng.randrange(first, last)] ^= 1 << rng.randrange(8)


# Damages return what they did, or None if the dice gave something that changes nothing.
def one_bit(world: World, rng: random.Random) -> str | None:
    path = world.some_file(rng)
    changed(path, lambda raw: flip(raw, 0, len(raw), rng))
    return f"bit of {path}"


def header_bit(world: World, rng: random.Random) -> str | None:
    path = world.some_shard(rng)
    changed(path, lambda raw: flip(raw, 0, 8 + int.from_bytes(raw[:8], "little"), rng))
    return f"header bit of {path}"


def record_bit(world: World, rng: random.Random) -> str | None:
    path = world.some_directory(rng) / rng.choice([INDEX, MANIFEST])
    changed(path, lambda raw: flip(raw, 0, len(raw), rng))
    return f"bit of {path}"


def cut_off(world: World, rng: random.Random) -> str | None:
    path = world.some_file(rng)
    cut = rng.randrange(path.stat().st_size)
    changed(path, lambda raw: raw.__delitem__(slice(cut, None)))
    return f"{path} cut at {cut}"


def extended(world: World, rng: random.Random) -> str | None:
    path = world.some_file(rng)
    more = bytes(rng.randrange(1, 100)) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 100))
    changed(path, lambda raw: raw.extend(more))
    return f"{len(more)} bytes behind {path}"


def missing_file(world: World, rng: random.Random) -> str | None:
    path = world.some_file(rng)
    path.unlink()
    return f"{path} removed"


def extra_file(world: World, rng: random.Random) -> str | None:
    path = world.some_file(rng)
    shutil.copy(path, path.with_name(f"extra-{path.name}"))
    return f"a copy of {path} beside it"


def lost_block(world: World, rng: random.Random) -> str | None:
    """Zeros or rubbish in the place of a block."""
    path = world.some_file(rng)
    rubbish = rng.random() < 0.5

    def change(raw: bytearray) -> None:
        start = rng.randrange(len(raw))
        block = raw[start : start + 512]
        raw[start : start + 512] = bytes(byte ^ 0x5A for byte in block) if rubbish else bytes(len(block))

    return f"block of {path}" if changed(path, change) else None


def stale_copy(world: World, rng: random.Random) -> str | None:
    """A file of another conversion, of equal shapes and name."""
    number = rng.randrange(2)
    stale = rng.choice(
        [(world.base / "old", world.converted), (world.base / f"old-ranks/rank-{number}-of-2", world.rank(number))]
    )
    path = rng.choice([*sorted(stale[0].glob("*.safetensors")), stale[0] / MANIFEST])
    shutil.copy(path, stale[1] / path.name)
    return f"{path.name} of {stale[1].name} from an older conversion"


def ranks_exchanged(world: World, rng: random.Random) -> str | None:
    """The same file of the two ranks changes places."""
    path = rng.choice([*sorted(world.rank(0).glob("*.safetensors")), world.rank(0) / MANIFEST])
    other = world.rank(1) / path.name
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return f"{path.name} exchanged"


def rank_twice(world: World, rng: random.Random) -> str | None:
    number = rng.randrange(2)
    for path in world.rank(number).iterdir():
        shutil.copy(path, world.rank(1 - number) / path.name)
    return f"rank {number} in both places"


def rank_of_another_conversion(world: World, rng: random.Random) -> str | None:
    number = rng.randrange(2)
    for path in (world.base / f"old-ranks/rank-{number}-of-2").iterdir():
        shutil.copy(path, world.rank(number) / path.name)
    return f"rank {number} of the old conversion"


def names_exchanged(world: World, rng: random.Random) -> str | None:
    """Two tensors of equal dtype and shape change their names in the header."""
    path = world.some_shard(rng)
    pair = equal_pair(path, rng)
    if pair is None:
        return None
    first, second = (json.dumps(entry.name).encode() for entry in pair)

    def change(raw: bytearray) -> None:
        start = 8 + int.from_bytes(raw[:8], "little")
        header = bytes(raw[8:start]).rstrip()
        header = header.replace(first, b"\0").replace(second, first).replace(b"\0", second)
        raw[8:start] = header.ljust(start - 8)

    return f"names of {first!r} and {second!r} in {path}" if changed(path, change) else None


def index_entry(world: World, rng: random.Random) -> str | None:
    """An entry of the index is dropped, added, or sent to another file."""
    path = world.some_directory(rng) / INDEX
    index = json.loads(path.read_text())
    names, files = sorted(index["weight_map"]), sorted(set(index["weight_map"].values()))
    name, kind = rng.choice(names), rng.randrange(4)
    if kind == 0:
        del index["weight_map"][name]
    elif kind == 1:
        index["weight_map"][f"{name}.more"] = rng.choice(files)
    elif kind == 2:
        index["weight_map"][name] = rng.choice(
            [*(f for f in files if f != index["weight_map"][name]), "model.safetensors"]
        )
    else:
        index["metadata"]["total_size"] += rng.randrange(1, 100)
    path.write_text(json.dumps(index, indent=2))
    return f"index of {path.parent.name}: {kind} {name}"


def manifest_value(world: World, rng: random.Random) -> str | None:
    """A value of the manifest, its digest left alone."""
    path = world.some_directory(rng) / MANIFEST
    value = json.loads(path.read_text())
    what = lie(value, rng)
    raw = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
    same = raw == path.read_bytes()
    path.write_bytes(raw)
    return None if same else f"{path}: {what}"


def equal_pair(path: Path, rng: random.Random) -> tuple[TensorEntry, TensorEntry] | None:
    """Two tensors of a file with equal dtype and shape and other bytes."""
    by_kind: dict[object, list[TensorEntry]] = {}
    for entry in read_header(path).tensors.values():
        by_kind.setdefault((entry.dtype, entry.shape), []).append(entry)
    groups = [group for group in by_kind.values() if len(group) > 1]
    if not groups:
        return None
    first, second = rng.sample(rng.choice(groups), 2)
    raw = path.read_bytes()
    return None if raw[first.begin : first.end] == raw[second.begin : second.end] else (first, second)


def exchange(path: Path, rng: random.Random) -> str | None:
    pair = equal_pair(path, rng)
    if pair is None:
        return None
    first, second = pair

    def change(raw: bytearray) -> None:
        ours, theirs = raw[first.begin : first.end], raw[second.begin : second.end]
        raw[first.begin : first.end], raw[second.begin : second.end] = theirs, ours

    return f"data of {first.name} and {second.name} in {path}" if changed(path, change) else None


def tensors_exchanged(world: World, rng: random.Random) -> str | None:
    return exchange(world.some_shard(rng), rng)


def signed(directory: Path, what: str | None) -> str | None:
    refit(directory)
    return what


def tensors_exchanged_signed(world: World, rng: random.Random) -> str | None:
    path = world.some_shard(rng)
    return signed(path.parent, exchange(path, rng))


def some_tensor(directory: Path, rng: random.Random) -> TensorEntry:
    path = rng.choice(sorted(directory.glob("*.safetensors")))
    return rng.choice(list(read_header(path).tensors.values()))


def tensor_bit_signed(world: World, rng: random.Random) -> str | None:
    directory = world.some_directory(rng)
    entry = some_tensor(directory, rng)
    changed(entry.path, lambda raw: flip(raw, entry.begin, entry.end, rng))
    return signed(directory, f"bit of {entry.name} in {entry.path}")


def permuted_heads_signed(world: World, rng: random.Random) -> str | None:
    """Blocks of rows (heads, or rows of tiles) change places: all values are there, all shapes fit."""
    directory = world.some_directory(rng)
    entry = some_tensor(directory, rng)
    if not entry.shape or entry.shape[0] < 2:
        return None
    blocks = rng.choice([n for n in (2, 4, entry.shape[0]) if entry.shape[0] % n == 0])

    def change(raw: bytearray) -> None:
        data = np.frombuffer(raw, np.uint8)[entry.begin : entry.end].reshape(blocks, -1)
        order = list(range(blocks))
        rng.shuffle(order)
        raw[entry.begin : entry.end] = data[order].tobytes()

    what = f"rows of {entry.name} in {entry.path}, {blocks} blocks" if changed(entry.path, change) else None
    return signed(directory, what)


def replicated_differs_signed(world: World, rng: random.Random) -> str | None:
    directory = world.rank(rng.randrange(2))
    whole = [n for n, r in read_manifest(directory).tensors.items() if r.split is not None and r.split.axis is None]
    name = rng.choice(sorted(whole))
    entry = read_header(directory / read_manifest(directory).tensors[name].file).tensors[name]
    changed(entry.path, lambda raw: flip(raw, entry.begin, entry.end, rng))
    return signed(directory, f"replicated {name} in {directory.name}")


def side_file_signed(world: World, rng: random.Random) -> str | None:
    path = world.rank(rng.randrange(2)) / rng.choice(["config.json", "chat_template.jinja", "foo_config.json"])
    changed(path, lambda raw: flip(raw, 0, len(raw), rng))
    return signed(path.parent, f"{path}")


def index_signed(world: World, rng: random.Random) -> str | None:
    """The index says the same in other words, or another total."""
    what = index_entry(world, rng)
    for directory in (world.converted, world.rank(0), world.rank(1)):
        refit(directory)
    return what


def header_form_signed(world: World, rng: random.Random) -> str | None:
    """A header that says the same in another order of keys, or a metadata entry more."""
    path = world.some_shard(rng)
    more = rng.random() < 0.5

    def change(raw: bytearray) -> None:
        start = 8 + int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8:start])
        if more:
            table["__metadata__"]["note"] = "x"
        items = list(table.items())
        rng.shuffle(items)
        header = json.dumps(dict(items), separators=(",", ":")).encode()
        header = header.ljust(max(start - 8, len(header)))
        raw[:start] = len(header).to_bytes(8, "little") + header

    return signed(path.parent, f"header of {path}" if changed(path, change) else None)


def without_tensor(directory: Path, name: str, rename: str | None = None) -> None:
    """Take a tensor out of file, index and manifest, or give it another name in all three; every digest fits."""
    path = directory / read_manifest(directory).tensors[name].file
    header = read_header(path)
    raw = path.read_bytes()
    table: dict[str, Any] = {"__metadata__": header.metadata}
    data = b""
    for entry in header.tensors.values():
        if entry.name == name and rename is None:
            continue
        begin = len(data)
        data += raw[entry.begin : entry.end]
        called = rename if entry.name == name and rename is not None else entry.name
        table[called] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, len(data)]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % 64)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    index = json.loads((directory / INDEX).read_text())
    file = index["weight_map"].pop(name)
    if rename is not None:
        index["weight_map"][rename] = file
    size = sum(e.nbytes for p in sorted(directory.glob("*.safetensors")) for e in read_header(p).tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index["weight_map"].items()))}
    (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
    value = msgspec.to_builtins(read_manifest(directory))
    record = value["tensors"].pop(name)
    if rename is not None:
        value["tensors"][rename] = record | {"weight": rename}
    sealed = msgspec.convert(value, Manifest, strict=True).sealed()
    (directory / MANIFEST).write_bytes(sealed.encode())
    refit(directory)


def plain_tensor(directory: Path, rng: random.Random) -> str:
    """A tensor that is a weight of its own."""
    return rng.choice(sorted(n for n, r in read_manifest(directory).tensors.items() if r.part == "plain"))


def missing_tensor_signed(world: World, rng: random.Random) -> str | None:
    directory = world.some_directory(rng)
    name = plain_tensor(directory, rng)
    without_tensor(directory, name)
    return f"{name} gone from {directory.name}"


def extra_tensor_signed(world: World, rng: random.Random) -> str | None:
    """One that the family does not have, in the place of one that it has."""
    directory = world.some_directory(rng)
    name = plain_tensor(directory, rng)
    without_tensor(directory, name, rename=f"{name[:-7]}.other.weight")
    return f"{name} called another name in {directory.name}"


def manifest_value_signed(world: World, rng: random.Random) -> str | None:
    """A lie in a rank's manifest, sealed anew."""
    path = world.rank(rng.randrange(2)) / MANIFEST
    before, value = path.read_bytes(), msgspec.json.decode(path.read_bytes())
    what = lie(value, rng)
    try:
        forged = msgspec.json.decode(msgspec.json.encode(value), type=Manifest).sealed().encode()
    except msgspec.ValidationError:
        return None
    path.write_bytes(forged)
    return None if forged == before else f"{path}: {what}"


def recipe_signed(world: World, rng: random.Random) -> str | None:
    """What the converted manifest says of recipe, source or origin, sealed anew, the ranks told the same.

    The digests of the source's shards are told and not proved: those of its tensors are, which cover every byte of data.
    """
    key = rng.choice(["recipe", "source", "provenance", "conversion_id"])
    value = {key: msgspec.json.decode((world.converted / MANIFEST).read_bytes())[key]}
    before = json.dumps(value)
    if key == "provenance":
        value[key]["weights"]["text"] += rng.randrange(1, 9)
    elif key == "conversion_id":
        value[key] = rng.randbytes(16).hex()
    else:
        lie(value, rng)
    if key == "source" and isinstance(value[key], dict) and isinstance(value[key].get("files"), dict):
        for name, record in json.loads(before)[key]["files"].items():
            if isinstance(value[key]["files"].get(name), dict):
                value[key]["files"][name]["digest"] = record["digest"]
    if json.dumps(value) == before:
        return None
    try:
        for directory in (world.converted, world.rank(0), world.rank(1)):
            edit_manifest(directory, lambda manifest: manifest.update(value))
    except msgspec.ValidationError:
        return None
    return f"{key}: {before[:80]} -> {json.dumps(value)[:80]}"


def tile_named_otherwise_signed(world: World, rng: random.Random) -> str | None:
    """Ranges of a split that are not the partition's."""
    directory = world.rank(rng.randrange(2))
    cut = [n for n, r in read_manifest(directory).tensors.items() if r.split is not None and r.split.axis is not None]
    name = rng.choice(sorted(cut))

    def change(value: dict[str, Any]) -> None:
        split = value["tensors"][name]["split"]
        split["ranges"] = [
            (stop, 2 * stop - start) if start == 0 else (0, stop - start) for start, stop in split["ranges"]
        ]

    edit_manifest(directory, change)
    return f"ranges of {name} in {directory.name}"


def conversion_signed(world: World, rng: random.Random) -> str | None:
    """Everything fits everything: the converted directory and the ranks cut from it. Only the source knows better."""
    entry = some_tensor(world.converted, rng)
    changed(entry.path, lambda raw: flip(raw, entry.begin, entry.end, rng))
    refit(world.converted)
    for number in range(2):
        shutil.rmtree(world.rank(number))
    shard(world.converted, world.ranks, 2)
    return f"bit of {entry.name}, converted and split"


Damage = Callable[[World, random.Random], str | None]

KINDS: list[Damage] = [
    one_bit, header_bit, record_bit, cut_off, extended, missing_file, extra_file, lost_block, stale_copy, ranks_exchanged,
    rank_twice, rank_of_another_conversion, names_exchanged, index_entry, manifest_value, tensors_exchanged,
    tensors_exchanged_signed, tensor_bit_signed, permuted_heads_signed, replicated_differs_signed, side_file_signed,
    index_signed, header_form_signed, missing_tensor_signed, extra_tensor_signed, manifest_value_signed,
    tile_named_otherwise_signed, recipe_signed, conversion_signed,
]  # fmt: skip

AGAINST_THE_SOURCE = (recipe_signed, conversion_signed)
