"""The kernel bench and the tuning, with a clock of our own in place of a GPU."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.cli.main import main
from duovolt.kernels import checks, tuning
from duovolt.kernels.tuning import HALF_STAGES, STAGES, Choice, choice
from duovolt.perf import kernel_families, kernels, kernels_tune
from duovolt.perf.kernels import Case

SMALL = (
    Case("attention in", (("fp8", 64, 32), ("fp8", 32, 32))),
    Case("delta in", (("fp8", 64, 32), ("half", 24, 32))),
    Case("mixer out", (("fp8", 64, 48),), residual=True),
    Case("gate up", (("nvfp4", 64, 32), ("nvfp4", 64, 32)), swiglu=True),
    Case("down", (("nvfp4", 64, 64),), residual=True),
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "CASES", SMALL)
    monkeypatch.setattr(kernels_tune, "CASES", SMALL)
    for module in (kernels, kernels_tune):
        monkeypatch.setattr(module, "copies_of", lambda nbytes, pool=0: 2)
    monkeypatch.setattr("duovolt.cli.bench_kernels.CASES", SMALL)
    monkeypatch.setattr("duovolt.cli.bench_kernels.the_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(kernels, "the_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("duovolt.cli.bench_kernels.loadable", lambda device: ["sm_90", "compute_70"])
    monkeypatch.setattr("duovolt.cli.bench_kernels.choice", lambda device: Choice())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "prepare", lambda device: None)
    monkeypatch.setattr("duovolt.perf.prompts_tune.for_prompts", lambda chosen, device, tell: chosen)
    monkeypatch.setattr(kernels, "read_seconds", reading)


def reading(nbytes, device, pool, overlap=False) -> float:
    return 9e-6 if overlap else 1e-5


def ticking(calls, overlap=False) -> float:
    assert len(calls) == 2
    assert all(call.func.__name__ in ("linears", "swiglu", "mm") for call in calls)
    seconds = {"": 2e-5, "arithmetic": 1.5e-5, "loads": 1e-5}[choice_now().ablate]
    return seconds * {0: 1.0, 16: 0.75, 32: 0.5}[choice_now().rows] * (0.9 if overlap else 1.0)


def choice_now() -> Choice:
    return tuning._override.get() or Choice()


def test_bench_prints_a_line_a_case_and_what_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "time_graph", ticking)
    assert main(["bench", "kernels", "--tokens", "1", "3", "--ablate", "--only", "gate up", "delta in"]) == 0
    machine, *lines = capsys.readouterr().out.splitlines()
    assert "torch" in machine and "duovolt" in machine
    assert len(lines) == 2 * (2 * 2 + 2 * 2)
    assert "gate up" in lines[-1] and "no loads" in lines[-1] and "share 1.00" in lines[-1]
    assert "sm_90" in lines[0] and "T 1" in lines[0] and "20.00 us" in lines[0] and "share 0.50" in lines[0]
    assert main(["bench", "kernels", "--tokens", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {fact["case"] for fact in facts} == {case.name for case in SMALL}
    gate = next(fact for fact in facts if fact["case"] == "gate up")
    assert gate["nbytes"] == 2 * (64 * 32 // 2 + 64 * 2 + 4) and gate["share"] == 0.5 and gate["without"] == ""
    assert not gate["overlap"] and gate["floor"] == gate["floor_in_turn"] == 1e-5


def test_launches_that_overlap_are_held_against_a_read_that_overlaps(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "time_graph", ticking)
    command = ["bench", "kernels", "--tokens", "1", "--only", "down", "--overlap"]
    assert main(command) == 0
    own, portable = capsys.readouterr().out.splitlines()[1:]
    assert "18.00 us" in own and "share 0.50 of an overlapping read (0.56 of one in turn)" in own
    assert (
        "overlapping" not in portable and "share 0.56" in portable
    )  # code for sm_70 begins in turn, whatever is asked
    assert main([*command, "--json"]) == 0
    own, portable = json.loads(capsys.readouterr().out)
    assert own["overlap"] and (own["floor"], own["floor_in_turn"]) == (9e-6, 1e-5)
    assert math.isclose(own["share"], 0.5) and math.isclose(own["share_of_read_in_turn"], 1 / 1.8)
    assert (
        not portable["overlap"]
        and portable["share"] == portable["share_of_read_in_turn"] == own["share_of_read_in_turn"]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_the_plain_read_is_launched_as_what_is_held_against_it(monkeypatch, overlap):
    launched, timed = [], []

    class Recorder:
        def launch(self, name, grid, threads, arguments, shared_bytes, early):
            launched.append((name, grid, threads, shared_bytes, early))

    monkeypatch.undo()
    monkeypatch.setattr(kernels, "load", lambda source, device: Recorder())
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(kernels, "block_shared_bytes", lambda device: 227 << 10)
    monkeypatch.setattr(kernels, "multiprocessor_shared_bytes", lambda device: 228 << 10)

    def clock(calls, early=False) -> float:
        calls[0]()
        timed.append(early)
        return 1e-6 * len(timed)

    monkeypatch.setattr(kernels, "time_graph", clock)
    large = {(blocks * 3, 512, spread) for blocks in (1, 2, 4) for spread in {False, overlap}}
    assert kernels.read_seconds(kernels.FEW_BYTES, torch.device("cpu"), kernels.FEW_BYTES, overlap) == 1e-6
    assert set(timed) == {overlap} and {early for *_, early in launched} == {overlap}
    assert {(grid, threads, bool(room)) for _, grid, threads, room, _ in launched} == large
    launched.clear()
    kernels.read_seconds(64, torch.device("cpu"), 128, overlap)  # few bytes: small blocks, too
    few = {(blocks, 128, spread) for blocks in (16, 32, 64, 128, 256) for spread in {False, overlap}}
    assert {(grid, threads, bool(room)) for _, grid, threads, room, _ in launched} == large | few


@pytest.mark.parametrize("nbytes", [1, 100_000, 4 << 20, 50 << 20, 3 << 30])
def test_copies_are_together_larger_than_any_cache(monkeypatch, nbytes):
    pool = 512 << 20
    count = kernels.cold_copies(nbytes, pool, 32)
    assert count >= 2 and count * nbytes >= min(256 << 20, 4096 * nbytes)
    assert (count - 1) * nbytes < max(2 * nbytes, pool)
    assert count <= max(32, min(4096, -(-(256 << 20) // nbytes)))  # a read of a few bytes makes no millions of launches
    assert kernels.cold_copies(nbytes, 16) == max(2, -(-16 // nbytes))  # a small pool is what was asked for


def test_neighbours_are_the_launches_of_a_layer_with_and_without_the_operation(monkeypatch):
    """On the CPU, with launches that are only written down: every argument passes the operations' own checks."""
    names = []

    class Recorder:
        overlaps = clusters = False

        def launch(self, name, *arguments, **how):
            names.append(name)

    monkeypatch.setattr(checks, "module_on", lambda source, device: Recorder())
    for name in ("linear", "linears"):
        monkeypatch.setattr(kernel_families, name, lambda *a, name=name, **k: names.append(name))
    monkeypatch.setattr(kernel_families, "POOL_BYTES", 1)
    monkeypatch.setattr(
        kernel_families, "random_weight", lambda *matrix: SimpleNamespace(scale=torch.ones(1), nbytes=matrix[1])
    )
    found = list(kernel_families.neighbours(torch.device("cpu")))
    assert [one.name.split(",")[0] for one in found[:4:2]] == ["delta rule and neighbours", "qkv_rope and neighbours"]
    for one in found:
        for launches in (one.launches, one.peer):
            names.append("|")
            launches[0]()
    runs = [run.split() for run in " ".join(names).split("|")[1:]]
    assert runs[0] == ["rms_norm_5120", "linears", "delta_decode", "gated_rms_norm", "linear"]
    assert runs[4] == ["rms_norm_5120", "linears", "qkv_rope_int8", "linear"]
    assert [len(run) for run in runs[:8]] == [5, 4, 5, 4, 4, 3, 4, 3] and runs[:8] == runs[8:16]


def test_the_delta_rule_is_measured_with_lanes_too(monkeypatch):
    monkeypatch.setattr(kernel_families, "POOL_BYTES", 1)
    *rounds, prompt = kernel_families.delta(torch.device("cpu"))
    names = [
        f"decode, {lanes}{n} tokens and {n} replayed"
        for lanes in ("", "2 lanes, each ", "4 lanes, each ")
        for n in (1, 4)
    ]
    assert [one.name for one in rounds] == names
    assert [one.nbytes // rounds[index % 2].nbytes for index, one in enumerate(rounds)] == [1, 1, 2, 2, 4, 4]
    batch, state = rounds[5].launches[0].args[-1], rounds[5].launches[0].args[4]
    assert (
        batch.lanes.tolist() == [0, 1, 2, 3]
        and batch.counts.tolist() == [4] * 4
        and batch.firsts.tolist() == [0, 4, 8, 12]
    )
    assert state.state.shape[0] == 4 and rounds[5].launches[0].args[0].shape[0] == 16
    assert prompt.name == "prefill, 2,048 tokens, chunked"


def test_families_overlap_if_asked(monkeypatch, capsys):
    one = kernel_families.Measurement("decode", 10**6, [int])
    monkeypatch.setitem(kernel_families.FAMILIES, "delta", lambda device: iter([one]))
    monkeypatch.setattr(kernel_families, "time_graph", lambda calls, overlap: 1e-5 if overlap else 2e-5)
    monkeypatch.setattr(kernel_families, "read_seconds", reading)
    overlapped = "10.00 us  share 0.90 of an overlapping read (1.00 of one in turn)"
    for words, wanted in (([], "20.00 us  share 0.50"), (["--overlap"], overlapped)):
        assert main(["bench", "kernels", "--family", "delta", *words]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["bench", "kernels", "--family", "delta", "--overlap", "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert fact["overlap"] and math.isclose(fact["share"], 0.9) and math.isclose(fact["share_of_read_in_turn"], 1.0)
    said = kernel_families.Measurement("in turn by itself", 10**6, [int], overlap=False)
    monkeypatch.setitem(kernel_families.FAMILIES, "delta", lambda device: iter([said]))
    assert main(["bench", "kernels", "--family", "delta", "--overlap"]) == 0
    assert "share 1.00\n" in capsys.readouterr().out


def test_bench_forces_the_rows_of_an_item(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "time_graph", ticking)
    command = ["bench", "kernels", "--tokens", "1", "--only", "down", "--overlap", "--rows", "32", "16", "auto"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()[1:]  # the first names the card
    assert [line.split()[1] for line in lines] == ["sm_90", "compute_70", "sm_90", "sm_90"]
    assert "32 rows" in lines[0] and "9.00 us" in lines[0]
    assert "16 rows" in lines[2] and "13.50 us" in lines[2] and "auto rows" in lines[3] and "18.00 us" in lines[3]
    assert main([*command, "--ablate", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(fact["rows"], fact["without"]) for fact in facts if fact["arch"] == "sm_90"] == [
        (rows, without) for rows in ("32", "16", "auto") for without in ("", "arithmetic", "loads")
    ]
    assert main(["bench", "kernels", "--rows", "8"]) == 2


def test_tune_keeps_the_best_of_each_choice(monkeypatch, capsys):
    best, halves = {"nvfp4": 3, "fp8": 4, "half": 2}, {"nvfp4": 4, "fp8": 2}
    kept = Choice(best, 2, rows=16, half_stages=halves, mixed_stages=3)

    def clock(calls, overlap=False) -> float:
        assert overlap, "rounds overlap"
        now = choice_now()
        if 6 in now.stages.values():
            raise EnvironmentFault("shared memory of linear_half_8 failed")
        wrong = sum(abs(now.stages[name] - best[name]) for name in STAGES) + abs(now.mixed_stages - 3)
        wrong += (now.rows != 16) + sum(abs(now.half_stages[name] - halves[name]) for name in HALF_STAGES)
        return (10 + wrong + abs(now.blocks_a_sm - 2)) * 1e-6

    monkeypatch.setattr(kernels_tune, "time_graph", clock)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a card")
    assert main(["kernels", "tune"]) == 0
    out = capsys.readouterr().out
    assert "shared memory of linear_half_8 failed" in out and "kept" in out
    assert tuning.read() == {"a card": kept}
    found = kernels_tune.tune(torch.device("cpu"), lambda text: None)
    assert math.isclose(found.microseconds, 10)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a card")
    tuning._stored.cache_clear()
    assert choice(0) == kept
    tuning._stored.cache_clear()


def test_tune_keeps_what_differs_less_than_two_runs_do(monkeypatch):
    for gain, kept in ((0.005, Choice()), (0.02, Choice(rows=32))):
        monkeypatch.setattr(
            kernels_tune, "time_graph", lambda calls, overlap, gain=gain: 1e-5 * (1 - gain * (choice_now().rows == 32))
        )
        assert kernels_tune.tune(torch.device("cpu"), lambda text: None).chosen == kept


def test_tune_asks_an_older_card_only_for_its_blocks(monkeypatch):
    tried = []

    def clock(calls, overlap=False) -> float:
        tried.append(choice_now())
        return 1e-5

    monkeypatch.setattr(kernels_tune, "time_graph", clock)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 0))
    assert kernels_tune.tune(torch.device("cpu"), lambda text: None).chosen == Choice()
    assert set(map(repr, tried)) == {repr(Choice(blocks_a_sm=n)) for n in (0, 2, 3)}
