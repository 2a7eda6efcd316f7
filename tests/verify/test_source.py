"""Source to converted: kept words, quantised values within half a step, nothing missing, nothing changed since."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.plain import to_float32
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.manifest import read_manifest
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.damage import edit_tensor, refit
from duovolt.tests.verify.test_damage import failures, status
from duovolt.verify.proofs import verify
from duovolt.verify.report import describe_errors

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"
NORM = "model.language_model.norm.weight"
O_PROJ = "model.language_model.layers.3.self_attn.o_proj.weight"
GATE = "model.language_model.layers.1.mlp.gate_proj.weight"


@dataclass(frozen=True)
class Journey:
    source: Path
    converted: Path
    ranks: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("journey")
    shutil.copytree(FIXTURE, base / "source", copy_function=shutil.copyfile)
    convert(base / "source", base / "converted", load_recipe("v100"), 1, lambda count: None)
    shard(base / "converted", base / "ranks", 2)
    return base


@pytest.fixture
def journey(made: Path, tmp_path: Path) -> Journey:
    """A private copy of source, converted directory and ranks of the peers' tiny model."""
    for name in ("source", "converted", "ranks"):
        shutil.copytree(made / name, tmp_path / name)
    return Journey(tmp_path / "source", tmp_path / "converted", tmp_path / "ranks")


def edit_source(source: Path, tensor: str, change: Callable[[np.ndarray], object]) -> None:
    entry = Checkpoint.open(source).tensors[tensor]
    raw = bytearray(entry.path.read_bytes())
    change(np.frombuffer(raw, np.uint8)[entry.begin : entry.end])
    entry.path.write_bytes(raw)


@pytest.mark.parametrize("through_ranks", [False, True])
def test_the_whole_journey(journey: Journey, through_ranks: bool) -> None:
    """The same proofs hold against the converted directory and against the ranks joined."""
    target = {"ranks": journey.ranks} if through_ranks else {"converted": journey.converted}
    report = verify(source=journey.source, **target)
    assert report.ok and "skipped" not in status(report).values()
    assert len(report.errors) == 34
    lines = describe_errors(report.errors)
    assert lines[0].startswith("fp8_e4m3: 22 tensors") and lines[1].startswith("nvfp4: 12 tensors")


def test_the_error_table(journey: Journey) -> None:
    """Each measure against its definition, on the whole tensor in float64."""
    source, converted, manifest = (
        Checkpoint.open(journey.source),
        Checkpoint.open(journey.converted),
        read_manifest(journey.converted),
    )
    rows = {row.tensor: row for row in verify(source=journey.source, converted=journey.converted).errors}
    for name in (O_PROJ, GATE):
        weight = to_float32(source.read(name), "BF16").astype(np.float64)
        decoded = read_weight(converted, manifest, name).astype(np.float64)
        error = weight - decoded
        norms = np.linalg.norm(weight), np.linalg.norm(decoded)
        assert rows[name].max_abs == np.abs(error).max()
        assert rows[name].relative_l2 == pytest.approx(np.linalg.norm(error) / norms[0], rel=1e-9)
        assert rows[name].cosine == pytest.approx((weight * decoded).sum() / (norms[0] * norms[1]), rel=1e-9)
        assert 0 < rows[name].relative_l2 < 0.12


def test_a_kept_word(journey: Journey) -> None:
    edit_tensor(journey.converted, NORM, lambda data: data.__setitem__(10, data[10] ^ 4))
    refit(journey.converted)
    report = verify(source=journey.source, converted=journey.converted)
    (failure,) = failures(report, "source -> converted: kept words")
    word = int(Checkpoint.open(journey.source).read(NORM)[5])
    assert (failure.tensor, failure.index) == (NORM, [5])
    assert (failure.found, failure.expected) == (f"0x{word ^ 4:04x}", f"0x{word:04x}")
    assert [p.name for p in report.failed] == ["source -> converted: kept words"]


@pytest.mark.parametrize(("tensor", "bit"), [(O_PROJ, 0x80), (O_PROJ, 0x10), (GATE, 0x80), (GATE, 0x08)])
def test_a_quantised_code(journey: Journey, tensor: str, bit: int) -> None:
    """Sign and exponent bits move a value further than half a step; the value is named on both sides."""
    stored = Checkpoint.open(journey.converted).read(tensor).reshape(-1)
    at = int(np.argmax((stored & 0x7F) > 0x50 if tensor == O_PROJ else (stored & 0x77) > 0x60))
    edit_tensor(journey.converted, tensor, lambda data: data.__setitem__(at, data[at] ^ bit))
    refit(journey.converted)
    report = verify(source=journey.source, converted=journey.converted)
    (failure,) = failures(report, "source -> converted: quantised values")
    assert failure.tensor == tensor and failure.index is not None and failure.found != failure.expected
    source = to_float32(Checkpoint.open(journey.source).read(tensor), "BF16")
    assert float(failure.expected or "nan") == pytest.approx(float(source[tuple(failure.index)]))


@pytest.mark.parametrize("tensor", [NORM, GATE])
def test_a_source_that_changed(journey: Journey, tensor: str) -> None:
    edit_source(journey.source, tensor, lambda data: data.__setitem__(0, data[0] ^ 1))
    report = verify(source=journey.source, converted=journey.converted)
    assert [f.tensor for f in failures(report, "source -> converted: source bytes")] == [tensor]


def test_a_source_with_one_tensor_more_and_one_less(journey: Journey) -> None:
    """C09: what was made and what there was are the same set."""
    path = Checkpoint.open(journey.source).tensors[NORM].path
    for changed in (path, journey.source / "model.safetensors.index.json"):
        changed.write_bytes(changed.read_bytes().replace(NORM.encode(), NORM.replace("norm", "nrom").encode()))
    found = failures(verify(source=journey.source, converted=journey.converted), "source -> converted: source bytes")
    assert sorted((f.tensor, f.message.split(",")[0]) for f in found) == [
        (NORM, "the conversion read it"),
        (NORM.replace("norm", "nrom"), "in the source"),
    ]


def test_side_files(journey: Journey) -> None:
    (journey.source / "generation_config.json").write_text("{}")
    (journey.source / "new_config.json").write_text("{}")
    found = failures(verify(source=journey.source, converted=journey.converted), "source -> converted: side files")
    assert [(Path(f.file or "").name, f.message.split(":")[0]) for f in found] == [
        ("generation_config.json", "digest"),
        ("new_config.json", "in the source, but not carried over"),
    ]


def test_a_damaged_source_header(journey: Journey) -> None:
    path = journey.source / "model-00001-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    report = verify(source=journey.source, converted=journey.converted)
    assert path.name in failures(report, "source: headers and index")[0].message
    assert status(report)["source -> converted"] == "skipped"
    assert status(report)["converted: bytes of files and tensors"] == "proved"


def test_words_that_were_quantised_before(tmp_path: Path) -> None:
    """A source with codes and scales of its own: equal word for word once the layout is undone."""
    files = maker.quantised_source(tmp_path / "source", maker.config())
    maker.converted(tmp_path / "converted", maker.config(), source_files=files)
    report = verify(source=tmp_path / "source", converted=tmp_path / "converted")
    assert report.ok and not report.errors
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    assert verify(source=tmp_path / "source", ranks=tmp_path / "ranks").ok
    scale = GATE.replace("weight", "weight_scale")
    edit_tensor(tmp_path / "converted", scale, lambda data: data.__setitem__(33, data[33] ^ 1))
    refit(tmp_path / "converted")
    (failure,) = failures(
        verify(source=tmp_path / "source", converted=tmp_path / "converted"), "source -> converted: kept words"
    )
    assert (failure.tensor, failure.index) == (scale, [1, 1])  # second group of the second row of the first tile
