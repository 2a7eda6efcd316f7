"""Faults that users of comparable tools have reported, where a row spans several stages; and that no row lacks a test."""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.bands import canonical_rows
from duovolt.checkpoint.container import TensorEntry
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.runtime.engine.loading import EngineSettings, load_engine
from duovolt.runtime.parallel.base import SoloCollective
from duovolt.shard.grid import grid_of
from duovolt.tests.support import maker
from duovolt.tests.support.journey import Journey

TESTS = Path(__file__).parent.parent
# Section and number of every row that this project's file stages answer for.
ROWS = [f"{section}{n:02}" for section, last in (("D", 10), ("F", 10), ("S", 15)) for n in range(1, last + 1)]
ROWS += ["O02", "O03"]


def test_every_row_has_a_test() -> None:
    """The id of each row stands in the docstring of a test, so that a reader finds the whole kind."""
    found: dict[str, int] = {}
    for path in TESTS.rglob("test_*.py"):
        for docstring in re.findall(r'def test_\w+\([^"]*?"""(.*?)"""', path.read_text(), flags=re.S):
            for row in re.findall(r"\b[DFSO]\d\d\b", docstring):
                found[row] = found.get(row, 0) + 1
    assert [row for row in ROWS if row not in found] == []


@dataclass(frozen=True)
class Places(Journey):
    """The directories of a journey."""

    def commands(self, target: Path) -> dict[str, list[str]]:
        """Every later stage, by the directory that it reads."""
        source, converted, ranks = str(self.source), str(self.converted), str(self.ranks)
        return {
            "inspect source": ["inspect", source],
            "plan source": ["plan", source],
            "convert source": ["convert", source, str(target)],
            "dequantize source": ["dequantize", source, str(target)],
            "inspect converted": ["inspect", converted],
            "shard converted": ["shard", converted, str(target), "--tp", "2"],
            "dequantize converted": ["dequantize", converted, str(target)],
            "verify converted": ["verify", "--converted", converted],
            "dequantize ranks": ["dequantize", ranks, str(target)],
            "verify ranks": ["verify", "--ranks", ranks],
        }

    def run(self, *umask: int) -> None:
        """Every stage, from the source on."""
        assert main(["convert", str(self.source), str(self.converted), "--quiet", "--arithmetic", "numpy"]) == 0
        assert main(["shard", str(self.converted), str(self.ranks), "--tp", "2", "--quiet"]) == 0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Places:
    places = Places(tmp_path_factory.mktemp("cases"))
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, vocab_size=64) | {"vision_config": None}
    maker.plain_source(places.source, config, max_shard_bytes=100_000)
    places.run()
    return places


@pytest.fixture
def places(pristine: Places, tmp_path: Path) -> Places:
    shutil.copytree(pristine.base, tmp_path / "journey")
    return Places(tmp_path / "journey")


def first_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[0]


def engine_refuses(directory: Path, word: str) -> None:
    with pytest.raises(InputError, match=re.escape(word)):
        load_engine(directory, SoloCollective(), EngineSettings(max_context=64))


def test_a_missing_shard_stops_every_later_stage(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D05: one line names the file and what to do, before any weight is read or anything written."""
    gone = {
        "source": first_shard(places.source),
        "converted": first_shard(places.converted),
        "ranks": first_shard(places.ranks / "rank-1-of-2"),
    }
    for path in gone.values():
        path.unlink()
    for name, command in places.commands(tmp_path / "target").items():
        code = main(command)
        captured = capsys.readouterr()
        assert code in (1, 2), name
        assert gone[name.split()[1]].name in captured.out + captured.err, name
        assert not (tmp_path / "target").exists(), name
    engine_refuses(places.converted, gone["converted"].name)


def test_bytes_too_many_get_one_verdict_from_every_reader(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F02: refused by all, with their number; so is a file cut off (F01)."""
    for path in (places.source, places.converted, places.ranks / "rank-1-of-2"):
        with first_shard(path).open("ab") as handle:
            handle.write(bytes(8))
    for name, command in places.commands(tmp_path / "target").items():
        code = main(command)
        captured = capsys.readouterr()
        assert code in (1, 2) and "8 too many" in captured.out + captured.err, (name, captured)
    assert not (tmp_path / "target").exists()
    engine_refuses(places.converted, "8 too many")


def test_links_become_content(places: Places, tmp_path: Path) -> None:
    """D07: a source made of relative links to blobs, as a hub cache has it: the output has none, and needs it no more."""
    wanted = {p.name: p.read_bytes() for p in places.converted.iterdir()}
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(places.source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    linked = Places(tmp_path / "linked")
    linked.base.mkdir()
    linked.source.symlink_to(snapshot)
    linked.run()
    shutil.rmtree(tmp_path / "cache")
    assert {p.name: p.read_bytes() for p in linked.converted.iterdir()} == wanted
    assert not any(path.is_symlink() for path in linked.converted.rglob("*"))
    assert main(["verify", "--converted", str(linked.converted), "--ranks", str(linked.ranks), "--quiet"]) == 0
    load_engine(linked.converted, SoloCollective(), EngineSettings(max_context=64))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than the temporary one."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system that can be written to")
    with tempfile.TemporaryDirectory(dir=shared) as place:
        yield Path(place)


def test_output_on_another_file_system(
    places: Places, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """D08: temporary files stand beside their target, so that no rename crosses a border; the bytes are the same."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    far = Places(elsewhere / "journey")
    far.base.mkdir()
    far.source.symlink_to(places.source)
    far.run()
    for there, here in ((far.converted, places.converted), (far.ranks, places.ranks)):
        files = {str(p.relative_to(here)): p.read_bytes() for p in here.rglob("*") if p.is_file()}
        assert {str(p.relative_to(there)): p.read_bytes() for p in there.rglob("*") if p.is_file()} == files


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes_of_every_stage_follow_the_umask(places: Places, umask: int) -> None:
    """D09: weights and JSON alike, in every stage and after a repair."""
    made = Places(places.base / f"with {umask:o}")
    made.base.mkdir()
    made.source.symlink_to(places.source)
    before = os.umask(umask)
    try:
        made.run()
        assert main(["dequantize", str(made.ranks), str(made.base / "plain"), "--quiet"]) == 0
        first_shard(made.converted).unlink()
        first_shard(made.ranks / "rank-0-of-2").unlink()
        repair = [
            "--source",
            str(made.source),
            "--converted",
            str(made.converted),
            "--ranks",
            str(made.ranks),
            "--repair",
        ]
        assert main(["verify", *repair, "--quiet"]) == 0
    finally:
        os.umask(before)
    files = [p for place in (made.converted, made.ranks, made.base / "plain") for p in place.rglob("*") if p.is_file()]
    assert len(files) >= 19 and {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o666 & ~umask}


class _Failing:
    """A file whose reads fail from the n-th on, as those of a dying disk do."""

    def __init__(self, handle: Any, after: int) -> None:
        self._handle, self._left = handle, after

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, *count: int) -> bytes:
        self._spend()
        return self._handle.read(*count)

    def readinto(self, view: memoryview) -> int:
        self._spend()
        return self._handle.readinto(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __enter__(self) -> "_Failing":
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()


@pytest.mark.parametrize("after", [0, 1])
def test_read_errors(
    places: Places, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that gives an error in mid-read: exit code 1 or 3 and a message that names the file, nothing half-written."""
    bad = {first_shard(places.source), first_shard(places.converted), first_shard(places.ranks / "rank-1-of-2")}
    sound = Path.open

    def opened(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        handle = sound(self, mode, *more, **options)
        return _Failing(handle, after) if "r" in mode and self in bad else handle

    monkeypatch.setattr(Path, "open", opened)
    for name, command in places.commands(tmp_path / "target").items():
        if after and not name.startswith(("convert", "shard", "dequantize", "verify")):
            continue  # these read headers only
        code = main(command)
        captured = capsys.readouterr()
        assert code in (1, 3), (name, captured)
        assert os.strerror(errno.EIO) in captured.out + captured.err, (name, captured)
        assert any(path.name in captured.out + captured.err for path in bad), (name, captured)
        assert "Traceback" not in captured.err and "unexpected" not in captured.err
        assert not [p for p in tmp_path.glob("target/**/*.safetensors") if not p.name.startswith(".")], name
        shutil.rmtree(tmp_path / "target", ignore_errors=True)


def test_biases_are_not_the_familys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S05: a bias after a row-parallel product would be added once a rank; there is none, and one that comes is refused."""
    maker.plain_source(tmp_path / "source", maker.config(num_hidden_layers=1, full_attention_interval=1))
    path = tmp_path / "source" / "model-00001-of-00001.safetensors"
    name = "model.language_model.layers.0.self_attn.o_proj.bias"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    end = len(raw) - 8 - length
    more = f',"{name}":{{"dtype":"BF16","shape":[64],"data_offsets":[{end},{end + 128}]}}}}'
    header = raw[8 : 8 + length].rstrip()[:-1] + more.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :] + bytes(128))
    index = tmp_path / "source" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "{path.name}", '))
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "converted")]) == 2
    assert name in capsys.readouterr().err and not (tmp_path / "converted").exists()


def test_one_dimensional_tensors_follow_their_role(pristine: Places) -> None:
    """S04: cut where the layer's output is cut (A_log, dt_bias), replicated where it is not (norms), scalars replicated."""
    records = read_manifest(pristine.ranks / "rank-1-of-2").tensors
    axes: dict[str, set[int | None]] = {}
    for name, record in records.items():
        if len(record.canonical_shape) < 2 and record.split is not None:
            axes.setdefault(name.rpartition(".")[2] if "norm" not in name else "norm", set()).add(record.split.axis)
    assert axes["A_log"] == axes["dt_bias"] == {0}
    assert axes["norm"] == axes["weight_scale_2"] == {None}
    assert axes["weight_scale"] == {0, None}  # of rows: cut with the output, whole where the input is cut


def test_indices_beyond_31_bits_survive_the_cut(tmp_path: Path) -> None:
    """F06: marks at 2^31 - 1, 2^31 and the last element of a sparse tensor, read, cut and placed."""
    rows, columns = 65_537, 32_768
    path = tmp_path / "sparse"
    marks = {2**31 - 1: 7, 2**31: 8, rows * columns - 1: 9}
    with path.open("wb") as handle:
        for at, value in marks.items():
            handle.seek(at)
            handle.write(bytes([value]))
    entry = TensorEntry("x", "U8", (rows, columns), path, 0, rows * columns)
    record = maker.plain_record("x", "U8", (rows, columns))
    grid = grid_of("canonical", "U8", (rows, columns))
    for at, value in marks.items():
        row, column = divmod(at, columns)
        band = canonical_rows(entry, record, row, row + 1)
        assert band[0, column] == value and set(band[0]) <= {0, *marks.values()}
        cells = band.reshape(1, columns, 1)
        (upper,) = grid.cut(cells, row, 0, ((row, rows),))
        assert upper[0, column, 0] == value
        left, right = (grid.cut(cells, row, 1, (half,))[0] for half in ((0, columns // 2), (columns // 2, columns)))
        half = (right if column >= columns // 2 else left)[0, :, 0]
        assert half[column % (columns // 2)] == value and len(left[0]) == len(right[0]) == columns // 2
        assert grid.row_bytes * row + column == at
