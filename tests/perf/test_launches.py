"""`bench launches`: every kernel of a round is set up at its real shape; forecasts take what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.kernels import attention, delta, linear, norm, rope
from duovolt.perf import kernels, launch_measure
from duovolt.perf.cards import load_card
from duovolt.perf.launch_file import LaunchTime, LaunchTimes, at_bytes, coverage, distinct, read_launch_times
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.machine import Machine
from duovolt.perf.model_source import sheet_at
from duovolt.perf.predict import Setting, forecast

MACHINE = Machine(
    card="NVIDIA H200", capability=(9, 0), multiprocessors=132, core_mhz=1980, memory_mhz=3201, bus_bits=6144,
    l2_bytes=1, memory_bytes=1, driver="580.1", torch="2.11", cuda="13.0", duovolt="0", date="2026-01-01",
)  # fmt: skip
NOT_MEASURED = {"attention_merge", "round_rows", "round_advance", "embed_fp32", "elementwise", "round_scatter"}


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch references in place of the kernels, and one copy in place of a pool."""
    for module, names in ((kernels, ("linears", "swiglu")),):
        for name in names:
            monkeypatch.setattr(module, name, getattr(linear, f"{name}_reference"))
    for source, name in (
        (norm, "rms_norm"), (norm, "gated_rms_norm"), (norm, "embed"), (rope, "qkv_rope"),
        (attention, "decode_attention"), (delta, "delta_decode"),
    ):  # fmt: skip
        monkeypatch.setattr(launch_measure, name, getattr(source, f"{name}_reference"))
    monkeypatch.setattr(launch_measure, "copies_of", lambda nbytes, pool: 2)


@pytest.mark.parametrize("kv", ["int8", "fp16"])
def test_every_large_launch_of_a_round_can_be_called(on_the_host: None, kv: str) -> None:
    """At the bundled model's shapes but for its heads, which the kernels' fixed ones replace."""
    ledger = ledger_of(sheet_at("tiny", 2, None), Shape(context=150, drafts=2, lanes=2, kv=kv))
    called = set()
    for launch in distinct(ledger.launches):
        calls = launch_measure._calls(launch, torch.device("cpu"))
        assert calls is not None and len(calls) >= 2, launch.key
        out = calls[0]()
        first = out[0] if isinstance(out, list) else out
        rows = launch.tokens * launch.lanes
        assert isinstance(first, torch.Tensor) and first.shape[0] == rows, launch.key
        called.add(launch.kernel)
    assert {launch.kernel for launch in ledger.launches} - called - NOT_MEASURED <= {
        "reduce", "gather", "sampling_adjust", "sampling_judge", "sampling_draw",
    }  # fmt: skip


def test_a_round_has_the_launches_that_a_profile_counted() -> None:
    """598 kernels and copies of a round of the 27B on one H200: all but the copy of the report to the host."""
    ledger = ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(8192, 3))
    counts: dict[str, int] = {}
    for launch in ledger.launches:
        counts[launch.kernel] = counts.get(launch.kernel, 0) + 1
    assert len(ledger.launches) == 597
    assert counts["rms_norm"] == 144 and counts["delta_decode"] == counts["gated_rms_norm"] == 48
    assert counts["linear"] + counts["linears"] + counts["swiglu"] == 134 + 93 + 48
    assert counts["attention_int8"] == counts["qkv_rope_int8"] == counts["attention_merge"] == 19


def times_of(tmp_path: Path, scale: float = 1.0) -> Path:
    launches = []
    for context in (8192, 32768):
        for launch in distinct(ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(context, 3)).launches):
            launches.append(LaunchTime(launch.key, launch.moved, scale * (1e-6 + launch.moved / 1e12)))
    launches.append(LaunchTime("x", 1.0, 0.0, why="no measurement of this kernel"))
    path = tmp_path / "launches.json"
    path.write_bytes(LaunchTimes(MACHINE, ["qwen3.8-27b"], launches).encode())
    return path


def test_a_forecast_adds_up_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = times_of(tmp_path)
    card = load_card("h200").with_launches([read_launch_times(path)])
    for context in (8192, 20_000, 32768):  # between measured depths too
        ledger = ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(context, 3))
        found = forecast(ledger, card, Setting())
        own = [launch for launch in ledger.launches if launch.key in card.exact]
        assert found.families["attention"][2] == pytest.approx(sum(1e-6 + x.moved / 1e12 for x in own if x.kv))
        linears = [launch for launch in own if launch.family in ("linear", "head")]
        total = found.families["linear"][2] + found.families["head"][2]
        assert total == pytest.approx(sum(1e-6 + launch.moved / 1e12 for launch in linears))
        assert coverage(ledger.launches, card.exact) == (len(own), 597)
    command = ["predict", "qwen3.8-27b", "--card", "h200", "--drafts", "3", "--context", "8192"]
    assert main([*command, "--launches", str(path)]) == 0
    assert "of 597 launches were measured alone" in capsys.readouterr().out


def test_times_between_and_beyond_measured_sizes() -> None:
    points = [(100.0, 2.0), (200.0, 3.0), (400.0, 4.0)]
    assert [at_bytes(points, nbytes) for nbytes in (100, 150, 300, 600)] == [2.0, 2.5, 3.5, 5.0]
    assert at_bytes([(100.0, 2.0)], 100.5) == 2.0 and at_bytes([(100.0, 2.0)], 150) is None


@pytest.mark.parametrize("content", [{}, {"format": "x"}, {"machine": 1, "models": [], "launches": []}, [1]])
def test_other_files_are_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not a file of `duovolt bench launches"):
        read_launch_times(path)


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert main(["bench", "launches", "tiny"]) == 3
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["bench", "launches", "tiny", "--tp", "0"]) == 2
