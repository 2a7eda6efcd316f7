"""`bench engine`: what is measured with, on the CPU; figures themselves need a card."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from duovolt.cli import bench_engine
from duovolt.cli.main import _parser, main
from duovolt.convert.recipe import load_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.perf.curve import READ, Point, Series
from duovolt.perf.engine import Alone, Bench, breakdown, family_of, floor_of, prompt_operations
from duovolt.perf.forecast_file import read_measured
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.pair import words_of
from duovolt.perf.random_weights import random_weights
from duovolt.perf.shapes import configuration
from duovolt.perf.sheet import sheet_of
from duovolt.runtime.engine.cuda.executor import CudaExecutor
from duovolt.runtime.engine.cuda.weights import tensors_of
from duovolt.runtime.parallel.device import SoloDevice

TINY = ModelConfig.from_dict(configuration("tiny", 4))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def encodings() -> dict[str, str]:
    return {name: encoding or "bf16" for name, encoding in load_recipe("v100").encodings(TINY).items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_random_weights_have_the_sizes_that_the_ledger_counts(tp: int) -> None:
    weights = random_weights(TINY, encodings(), tp, tp - 1, CPU)
    sheet = sheet_of("tiny", TINY, dict.fromkeys(inventory(TINY), "bf16") | encodings(), tp)
    assert weights.tp_size == tp and weights.head.nbytes == sheet.head.nbytes
    for mine, counted in zip(weights.layers, sheet.layers, strict=True):
        assert mine.gate.nbytes == counted.gate.nbytes and mine.down.nbytes == counted.down.nbytes
        assert [w.nbytes for w in mine.mixer.inputs] == [matrix.nbytes for matrix in counted.inputs]
    assert all(bool(torch.isfinite(t.float()).all()) for t in tensors_of(weights) if t.is_floating_point())


@torch.inference_mode()
@pytest.mark.parametrize("tp", [1, 2])
def test_rounds_at_a_depth_keep_every_draft(tp: int) -> None:
    """The bench's own lanes: filled to a depth, forced, and let go; on the kernels' references."""
    weights = random_weights(TINY, encodings(), tp, 0, CPU)
    link = SoloDevice() if tp == 1 else Alone(2, 0)
    executor = CudaExecutor(weights, link, max_context=512, lanes=2, drafts=2, n_sampleable=3072, graphs=False)
    bench = Bench(executor, 2, 512)
    figures = bench.rounds(100, 2, 2, 10, profile=False)
    assert figures.rounds == 10 and figures.ms_low <= figures.ms <= figures.ms_high
    again = bench.rounds(200, 1, 2, 10, profile=False)
    assert again.context == 200
    read = bench.prefill(70, 32)
    assert read.tokens == 70 and read.seconds > 0


def test_kernels_are_told_apart() -> None:
    names = {
        "attention_int8_2": "attention", "attention_merge": "attention", "delta_decode": "delta", "linear_nvfp4": "linear",
        "swiglu_nvfp4": "linear", "gated_rms_norm": "small", "qkv_rope_int8": "small", "sampling_mass": "sampling",
        "mailbox_reduce": "collective", "void at::native::reduce_kernel<512>": "rest", "round_rows": "small",
        "sm90_xmma_gemm_f16": "linear",
    }  # fmt: skip
    assert {name: family_of(name) for name in names} == names


def test_idle_is_what_no_kernel_covers() -> None:
    """Overlapping kernels count once; two rounds of 10 us each, of which 3 us are empty in all."""
    spans = [(0.0, 4.0, "linear_fp8"), (3.0, 9.0, "attention_int8_1"), (10.0, 18.0, "linear_fp8"), (20.0, 20.0, "x")]
    found = breakdown(spans, 2)
    assert found.idle == pytest.approx(3 / 20)
    assert found.families == pytest.approx({"linear": 0.006, "attention": 0.003, "rest": 0.0})
    assert found.kernels["linear_fp8"] == pytest.approx((1.0, 0.006))


def test_the_floor_is_the_sum_of_plain_reads() -> None:
    """At a constant speed it is bytes over speed; a collective adds its latency; small kernels add nothing."""
    sheet = sheet_of("tiny", TINY, dict.fromkeys(inventory(TINY), "bf16") | encodings(), 2)
    ledger = ledger_of(sheet, Shape(1000, 3))
    flat = Series(READ, "sm_70", [Point(1 << 10, 100.0, 100.0, 0.0), Point(1 << 30, 100.0, 100.0, 0.0)])
    large = sum(x.read for x in ledger.launches if x.family in ("linear", "head", "attention", "delta"))
    assert floor_of(ledger, flat) == pytest.approx(large / 100e9 * 1e3, rel=1e-6)
    sums = sum(x.family == "collective" for x in ledger.launches)
    assert floor_of(ledger, flat, lambda launch: 5e-6) - floor_of(ledger, flat) == pytest.approx(sums * 5e-3)
    assert sums > 0


def test_the_operations_of_a_prompt() -> None:
    """Of the 27B: two a parameter of the layers and token, and attention that grows with the square."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    encodings = dict.fromkeys(inventory(config), "bf16")
    whole, half = (sheet_of("27b", config, encodings, tp) for tp in (1, 2))
    layers = sum(
        s.shape[0] * s.shape[1] for s in inventory(config).values() if ".layers." in s.name and len(s.shape) == 2
    )
    square = 2 * 17 * 24 * 256 * 8192**2
    assert prompt_operations(whole, 8192) == pytest.approx(2 * 8192 * layers + square, rel=1e-9)
    assert prompt_operations(half, 8192) == pytest.approx(prompt_operations(whole, 8192) / 2, rel=1e-9)


@pytest.mark.parametrize("tp", ["1", "2"])
def test_the_command_runs_through_on_the_references(
    tp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option and every line but the figures of a card; what it writes is what `predict --check` reads."""
    where = tmp_path / "engine.json"
    cut = "--head-split on" if tp == "2" else ""  # which one rank has no use for
    line = (
        f"bench engine --devices cpu --config tiny --layers 4 --tp {tp} --contexts 128 --lanes 1 --drafts 2 --rounds 10 "
        f"--prefill 70 --chunk 64 --draft-rows 512 --draft-window 64 --attention plain {cut} --json {where}"
    )
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "first token after      70" in out and out.count(" ms (") == 1 and "floor" not in out
    split, link = ("none", "solo") if tp == "1" else ("on", "alone")
    choices = (
        f"attention plain, head split {split}, draft head 512-rows, draft window 64, collective {link}, graphs off"
    )
    assert f", kv int8, {choices}, delta chunked" in out and "recipe v100" in out
    measured = read_measured(where)
    assert [(row.context, row.lanes, row.drafts, row.tp) for row in measured.rounds] == [(128, 1, 2, int(tp))]
    assert json.loads(where.read_text())["memory"]["used"] is None


def test_the_second_rank_is_told_to_measure_the_same() -> None:
    """What goes on its command line is read back as the same choices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    bench_engine.configure(parser)
    given = [
        "--devices",
        "0,1",
        "--contexts",
        "8192",
        "64",
        "--prefill",
        "--no-profile",
        "--layers",
        "4",
        "--json",
        "x.json",
    ]
    first = parser.parse_args(given)
    words = words_of("engine", first)
    assert words[:2] == ["bench", "engine"]
    second = parser.parse_args([*words[2:], "--twin", "name"])
    parted = {name for name, value in vars(first).items() if getattr(second, name) != value}
    assert parted == {"twin", "json", "quiet"} and second.prefill == [] and second.contexts == [8192, 64]


@pytest.mark.parametrize(
    "line",
    [
        "engine --dir ranks --devices 0,1 --graphs serial",
        "engine --devices 0,1",
        "launches tiny --devices 0,1 --drafts 0",
    ],
)
def test_what_the_second_rank_is_told_is_not_judged_again(line: str) -> None:
    """Its words state every choice, those too that only the first rank's words have no use for."""
    first = _parser("bench")[0].parse(["bench", *line.split()][1:])
    words = words_of(first.what, first, positional=("source",) if first.what == "launches" else ())
    second = _parser("bench")[0].parse([*words[1:], "--twin", "name"])
    parted = {name for name, value in vars(first).items() if getattr(second, name) != value}
    assert parted == {"twin", "quiet"}


@pytest.mark.parametrize("words", [["--devices", "0,1,2"], ["--devices", "x"], ["--lanes", "5"], ["--rounds", "1"]])
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.gpu
def test_memory_is_what_was_planned(tmp_path: Path) -> None:
    """L05: a slice of the 27B, prefill and rounds included: within 5 % and a constant of what small sizes round up."""
    where = tmp_path / "engine.json"
    words = [
        "bench",
        "engine",
        "--layers",
        "8",
        "--contexts",
        "8192",
        "--lanes",
        "1",
        "--prefill",
        "8192",
        "--rounds",
        "10",
    ]
    assert main([*words, "--no-profile", "--json", str(where), "--quiet"]) == 0
    memory = json.loads(where.read_text())["memory"]
    assert memory["used"] <= 1.05 * memory["planned"] and memory["used"] > 0.8 * memory["planned"]
