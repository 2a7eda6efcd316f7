"""Linears of many tokens: the bench by way and the tuning of ways, with a clock of our own in place of a GPU."""

import json
from contextlib import contextmanager

import pytest
import torch

from duovolt.cli.main import main
from duovolt.kernels import tuning
from duovolt.kernels.tuning import Choice
from duovolt.perf import kernels, prompt_layers, prompt_linears, prompts_tune
from duovolt.perf.kernels import Case
from duovolt.perf.prompt_layers import LayerRow
from duovolt.perf.prompt_linears import PrefillRow
from duovolt.perf.prompts_tune import LONG_PROMPT, PROMPTS, for_prompts, with_prompts


@pytest.mark.parametrize(
    ("faster", "beside", "expected"),
    [
        ((25, 49, 97, 128), 0.9, (25, 128, True)),
        ((97, 192), 1.0, (97, 97, False)),  # what is faster beyond a gap does not count
        ((25, 49, 128), 1.2, (49, 0, False)),
        ((25, 97, 128, 192, 256, 384, 512, 768), 0.995, (97, 768, False)),
    ],
)
def test_tuning_takes_the_run_of_tokens_where_the_wide_linear_is_faster(faster, beside, expected):
    ways = (("narrow", 1.0), ("beside", beside))
    rows = [PrefillRow("fp8", 64, 64, LONG_PROMPT, way, time, 1.0) for way, time in ways]
    for tokens in PROMPTS:
        for narrow in (1.0, 5.0):  # two matrices
            rows.append(PrefillRow("fp8", 64, 64, tokens, "narrow", narrow, 1.0))
            rows.append(PrefillRow("fp8", 64, 64, tokens, "wide", narrow * (0.8 if tokens in faster else 1.3), 1.0))
    chosen = with_prompts(Choice(blocks_a_sm=2), rows)
    assert (chosen.wide_from, chosen.wide_up_to, chosen.overlap_dequantising) == expected and chosen.blocks_a_sm == 2


@pytest.mark.parametrize(("worth", "ahead", "sparing"), [(0.9, tuning.AHEAD, 512), (0.995, 0, 0)])
def test_tuning_measures_with_the_choice_so_far_and_tells(monkeypatch, worth, ahead, sparing):
    own, lines = Choice(rows=16, sparing_up_to=0), []

    def prompts(tokens, device, routes):
        assert tuning._override.get() == own
        for count in tokens:
            for route in routes:
                seconds = {"narrow": 2.0, "wide": count / 100, "beside": 3.0}[route]
                yield PrefillRow("fp8", 64, 32, count, route, seconds, 1.0)

    def layers(tokens, device, routes, parts):
        now = tuning._override.get()
        assert now.wide_up_to == 192 and not parts
        for count in tokens:
            for name, slow in (("attention in", 1.0), ("delta in", 2.0)):
                seconds = slow * count * (1 if routes == ["narrow"] else worth + abs(now.sparing_up_to - 512) / 10000)
                yield LayerRow(name, count, routes[0], 1, seconds, 1.0, ())

    monkeypatch.setattr(prompts_tune, "measure_prefill", prompts)
    monkeypatch.setattr(prompts_tune, "measure_layers", layers)
    found = for_prompts(own, torch.device("cpu"), lines.append)
    assert found == Choice(rows=16, wide_from=25, wide_up_to=192, plain_ahead=ahead, sparing_up_to=sparing)
    assert len(lines) == 2 + 2 * len(PROMPTS) + 6 * 4 and "fp8 64 x 32, T 2048, beside" in lines[1]
    assert "layer of delta in, T 2048, ahead, sparing up to 1024" in lines[-7]


def test_bench_takes_every_way_that_is_asked_for(monkeypatch, capsys):
    asked: list[tuple[int, ...]] = []

    def product(x, weight, out):
        asked.append((len(x), *weight.shape))

    def clock(calls) -> float:  # what stands for a graph is its time
        asked.clear()
        (run,) = calls
        if run.args[0][0].func is torch.mm:
            assert len(run.args[0]) == prompt_linears.COPIES * prompt_linears.ROUNDS and run.args[1] is None
            return 3e-5
        run()
        assert len(asked) == prompt_linears.COPIES * prompt_linears.ROUNDS and len(set(asked)) == 1
        now = tuning._override.get()
        return (1 if now.wide_up_to == tuning.MOST_WIDE else 3 if now.overlap_dequantising else 6) * 1e-5

    monkeypatch.setattr("duovolt.cli.bench_kernels.the_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("duovolt.cli.bench_kernels.PREFILL", (("fp8", 64, 32),))
    monkeypatch.setattr("duovolt.cli.bench_kernels.MORE", (("nvfp4", 32, 64),))
    monkeypatch.setattr(prompt_linears, "captured", clock)
    monkeypatch.setattr(prompt_linears, "time_in_turn", lambda graphs, launches: graphs)
    monkeypatch.setattr(prompt_linears, "linear_block", product)
    monkeypatch.setattr(prompt_linears, "choice", lambda device: Choice())
    assert main(["bench", "kernels", "--prefill", "30", "60", "--route", "narrow", "wide", "beside", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [fact["route"] for fact in facts] == ["narrow", "wide", "beside"] * 4
    assert [(fact["encoding"], fact["rows"], fact["tokens"]) for fact in facts[::3]] == [
        *(("fp8", 64, 30), ("fp8", 64, 60), ("nvfp4", 32, 30), ("nvfp4", 32, 60))
    ]
    assert [fact["share"] for fact in facts[:3]] == [pytest.approx(n) for n in (0.5, 3.0, 1.0)]
    assert main(["bench", "kernels", "--prefill", "30"]) == 0
    assert "chosen" in capsys.readouterr().out


def test_a_single_matrix_is_measured_as_a_chunk_runs_it(monkeypatch):
    """By the way that makes weights ahead, and by a card's choice that does, within one pass whose matrices they all are."""
    passes: list[tuple[str, bool]] = []

    class Ring:
        @contextmanager
        def reading(self, kind):
            passes.append((kind, True))
            yield
            passes.append((kind, False))

    def ring(layer, largest, device):
        now = tuning._override.get()
        assert layer == 5120 * (5120 + 3072 + 48 + 3072 + 2 * 8704 + 8704) and largest == 17408 * 5120
        return Ring() if now.layers_ahead((9, 0)) else None

    def product(x, weight, out):
        assert out.shape == (len(x), 64)
        inside.append(bool(passes and passes[-1][1]))

    inside: list[bool] = []
    monkeypatch.setattr(prompt_linears, "ring", ring)
    monkeypatch.setattr(prompt_linears, "linear_block", product)
    monkeypatch.setattr(prompt_linears, "captured", lambda calls: [call() for call in calls])
    monkeypatch.setattr(prompt_linears, "time_in_turn", lambda graphs, launches: [1.0, 4.0, 2.0, 2.0])
    monkeypatch.setattr(prompt_linears, "choice", lambda device: Choice())
    shapes = [("fp8", 64, 32)]
    rows = list(prompt_linears.measure_prefill([32], torch.device("cpu"), ["narrow", "ahead", "chosen"], shapes))
    assert [(row.route, row.ratio) for row in rows] == [("narrow", 0.25), ("ahead", 0.5), ("chosen", 0.5)]
    assert passes == [("run", True), ("run", False)] * 2
    count = prompt_linears.COPIES * prompt_linears.ROUNDS
    assert inside == [False] * count + [True] * 2 * count


def test_a_layers_linears_as_the_engine_calls_them(monkeypatch, capsys):
    """Small matrices in place of the 27B's, every call made, against one product a matrix."""
    made: list[tuple[str, int]] = []

    def linears(x, weights, outs):
        assert all(
            out.dtype == torch.float32 and out.shape == (len(x), w.shape[0])
            for w, out in zip(weights, outs, strict=True)
        )
        made.append(("in", len(weights)))

    def in_chain(ways):
        assert not any(way.ahead for way in ways)  # not on a CPU
        assert [way.chosen.overlap_dequantising for way in ways[1:]] == [False, True][: len(ways) - 1]
        return [[1e-5] * 4] + [[2e-5] * 4] * (len(ways) - 1)

    small = [Case(case.name, tuple((kind, 32, 64) for kind, *_ in case.matrices)) for case in kernels.CASES]
    monkeypatch.setattr("duovolt.cli.bench_kernels.the_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(prompt_layers, "CASES", small)
    monkeypatch.setattr(prompt_layers, "linear_blocks", linears)
    monkeypatch.setattr(prompt_layers, "linear_block", lambda x, weight: made.append(("one", 1)))
    monkeypatch.setattr(prompt_layers, "swiglu_block", lambda x, gate, up: made.append(("gates", 2)))
    monkeypatch.setattr(prompt_layers, "captured", lambda launches: [launch() for launch in launches])
    monkeypatch.setattr(prompt_layers, "time_in_turn", lambda graphs, launches: [3e-5, *[6e-5] * (len(graphs) - 1)])
    monkeypatch.setattr(prompt_layers, "in_chain", in_chain)
    monkeypatch.setattr(prompt_linears, "choice", lambda device: Choice())
    assert main(["bench", "kernels", "--prefill", "30", "--layers", "--route", "narrow", "beside", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(fact["layer"], fact["route"]) for fact in facts] == [
        (layer, way) for layer in prompt_layers.LAYERS for way in ("narrow", "beside")
    ]
    assert all(fact["share"] == pytest.approx(0.5) for fact in facts)
    assert [fact["flops"] for fact in facts[::2]] == [
        2 * 30 * 32 * 64 * count for count in (3 + 1 + 2 + 1, 4 + 1 + 2 + 1)
    ]
    assert all(part["seconds"] == 2 * part["cublas"] for fact in facts for part in fact["parts"])
    assert [part["name"] for part in facts[0]["parts"]] == ["attention in", "mixer out", "gate up", "down"]
    passes = prompt_layers.COPIES * (1 + 2 * 2)  # once for the factors, then each way, in the chain and alone
    assert made.count(("in", 3)) == made.count(("in", 4)) == made.count(("gates", 2)) / 2 == passes
    assert main(["bench", "kernels", "--prefill", "30", "--layers"]) == 0
    told = capsys.readouterr().out
    assert (
        "layer of attention in" in told
        and "gate up      in the chain     20.0 us  cuBLAS     10.0 us  share 0.50" in told
    )
