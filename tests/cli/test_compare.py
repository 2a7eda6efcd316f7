"""`duovolt compare`: the layers of two backends and of two widths, on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from duovolt.cli.main import main
from duovolt.kernels import module
from duovolt.kernels.module import Module, counted_launches
from duovolt.perf.layerwise import Reading, Run, compare


@pytest.fixture(scope="module")
def folder(tiny: Path) -> Path:
    torch.set_num_threads(1)
    return tiny


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["compare", "--tokens", "20", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_backends_and_widths_within_their_bounds(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """fp16 activations and an int8 cache against float32; two ranks against one; the same thing against itself."""
    whole, two = folder / "converted", folder / "ranks-2"
    code, out, _ = run(capsys, whole, two, "--b", "cuda", "--devices", "cpu", "--json", "--most", "5e-3")
    found = json.loads(out)
    assert code == 0 and len(found["layers"]) == 8 and found["b"] == {"backend": "cuda", "ranks": 2, "launches": {}}
    assert all(row["cosine"] > 0.9999 and 0 < row["relative"] <= row["worst_relative"] for row in found["layers"])
    code, out, _ = run(capsys, whole, two, "--b", "reference", "--most", "1e-5")
    assert code == 0 and "full_attention" in out and "largest |a-b|/|a|" in out
    code, out, _ = run(capsys, whole, "--b", "reference", "--most", "0")
    assert code == 0 and "1.000000000" in out
    for backend, most in (("cuda", "5e-3"), ("reference", "1e-5")):
        words = ["--devices", "cpu", "--chunk", "7", "--decode", "10", "--b", backend, "--json", "--most", most]
        code, out, _ = run(capsys, whole, two, *words)
        assert code == 0 and json.loads(out)["tokens"] == 20


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{folder}/converted", "--most", "1e-9", "--devices", "cpu"], 1, "more than 1e-09"),
        (["{folder}/none"], 2, "no such directory"),
        (["{folder}/two/rank-1-of-2", "--b", "reference"], 2, "rank"),
        (["{folder}/converted", "--devices", "7"], 2, "this machine shows"),
        (["{folder}/converted", "--devices", "0,1"], 2, "more cards than ranks, of which there is 1"),
        (["{folder}/converted", "--arch-b", "nope"], 2, "architecture 'nope'"),
        (
            ["{folder}/converted", "--arch-a", "compute_70"],
            2,
            "--arch-a has no effect here: it is read only with --a cuda.",
        ),
        (["{folder}/converted", "--arch-b", "compute_70", "--devices", "cpu"], 2, "on cpu no kernel runs"),
        (["{folder}/converted", "--tokens", "32769"], 2, "the model knows 32768 positions"),
        (["{folder}/converted", "--tokens", "0"], 2, "at least 1"),
        (["{folder}/converted", "--chunk", "0"], 2, "--chunk 0"),
        (["{folder}/converted", "--decode", "20"], 2, "--decode 20: expected fewer than --tokens, 20"),
        (["{folder}/converted", "--text", "{folder}/nothing.txt"], 2, "nothing.txt"),
    ],
)
def test_what_does_not_hold_or_cannot_be(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str], code: int, said: str
) -> None:
    found, _, err = run(capsys, *(word.format(folder=folder) for word in words))
    assert found == code and said in err and "Traceback" not in err


@pytest.mark.gpu
@pytest.mark.parametrize("decoded", ["0", "16"])
def test_the_code_that_was_asked_for_ran(capsys: pytest.CaptureFixture[str], folder: Path, decoded: str) -> None:
    """Two builds on one card: each side's launches are its own's, and decoding's products differ in their last bits."""
    words = ["--a", "cuda", "--b", "cuda", "--arch-b", "compute_70", "--decode", decoded, "--json", "--most", "5e-3"]
    code, out, _ = run(capsys, folder / "converted", *words)
    found = json.loads(out)
    (native,) = found["a"]["launches"]
    assert code == 0 and native.startswith("sm_") and list(found["b"]["launches"]) == ["compute_70"]
    if native != "sm_70":
        assert max(row["relative"] for row in found["layers"]) > 0


def test_the_measures() -> None:
    """Of outputs that can be reckoned by hand: one token right, one token off by half its length."""
    a, b = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    (row,) = compare([a], [b], ("full_attention",))
    assert row.relative == pytest.approx(1 / 29**0.5) and row.worst_relative == pytest.approx(0.5)
    assert row.cosine == pytest.approx(27 / (29**0.5 * 26**0.5))


def test_what_ran_is_counted_where_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the code that a module was loaded with, whatever was asked for; only within the block."""
    own = Module.__new__(Module)
    own.arch, own._device, own._handle = "compute_70", 0, 7
    own._starts, own._shared, own.overlaps = {"copy": 1}, {}, False
    monkeypatch.setattr(module, "current_stream", lambda device: 0)
    monkeypatch.setattr(module, "current_context", lambda: 7)
    monkeypatch.setattr(module, "starter", lambda: lambda *arguments: 0)
    own.launch("copy", 1, 32, (1,))
    with counted_launches() as found:
        own.launch("copy", 1, 32, (1,))
        own.launch("copy", 1, 32, (1,))
    own.launch("copy", 1, 32, (1,))
    assert found == {"compute_70": 2} and Run([], found).code == "2 launches of compute_70 code"
    assert Run().code == "torch"


def test_what_is_read_and_how() -> None:
    pieces = [(part.start, part.stop, decoded) for part, decoded in Reading(8, 6).pieces(20)]
    assert pieces == [(0, 8, False), (8, 14, False), (14, 18, True), (18, 20, True)]
    assert [part for part, _ in Reading(8).pieces(8)] == [slice(0, 8)]
