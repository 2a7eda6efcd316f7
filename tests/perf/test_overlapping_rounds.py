"""Rounds whose launches overlap: edges are measured behind real predecessors and forecast other depths and models.

The card is simulated: a launch may begin when the one before admits it, does the first part of its work, and waits with the
rest until everything before it has ended. A norm admits the next launch at once, others near their end.
"""

import json
import statistics
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.kernels.delta import Round as DeltaRound
from duovolt.perf import launch_measure
from duovolt.perf.cards import Card, load_card
from duovolt.perf.device_timing import Timing, Together, time_queued
from duovolt.perf.launch_card import sections
from duovolt.perf.launch_edges import Edges, Placed, windows
from duovolt.perf.launch_file import Chain, Edge, LaunchTime, LaunchTimes, read_launch_times
from duovolt.perf.launch_measure import Costs, Found, Subject, Wanted, lone, measure_subject
from duovolt.perf.launch_record import Call, describe
from duovolt.perf.ledger import Ledger, Shape, ledger_of
from duovolt.perf.machine import Machine, machine_of
from duovolt.perf.model_source import model_at, sheet_at
from duovolt.perf.predict import Setting, forecast
from duovolt.perf.savings import savings_of

from .test_launches import Halves

CPU = torch.device("cpu")
US = 1e-6
START = 1 * US  # from the end of a launch to the begin of the next in turn
EARLY = {
    "linear",
    "linears",
    "swiglu",
    "rms_norm",
    "rms_norm_delta",
    "gated_rms_norm",
    "attention_int8",
    "qkv_rope_int8",
}
MACHINE = Machine(
    card="NVIDIA H200", capability=(9, 0), multiprocessors=132, core_mhz=1980, memory_mhz=3201, bus_bits=6144,
    l2_bytes=1, memory_bytes=1, driver="580.1", torch="2.11", cuda="13.0", duovolt="0", date="2026-01-01",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Seconds of a launch, and those of them that need nothing of its predecessors."""

    kernel: str
    seconds: float
    own: float


def work_of(key: str, nbytes: float) -> Work:
    kernel = key.partition(" ")[0]
    if kernel in ("linear", "linears", "swiglu"):
        seconds = (8 + zlib.crc32(key.encode()) % 30) * US
        return Work(kernel, seconds, 2.5 * US + 0.05 * seconds)
    return Work(kernel, 2 * US + nbytes / 3e12, 0.4 * US)


def run(works: Sequence[tuple[Work, bool]]) -> float:
    """Seconds until the last one's end; `True`: it may begin early."""
    admits, ended = 0.0, 0.0
    for work, early in works:
        begin = admits + 0.3 * US if early and work.kernel in EARLY else ended + START
        end = max(begin + work.own, ended) + work.seconds - work.own
        admits = begin if work.kernel.startswith("rms_norm") else max(begin, end - 0.9 * US)
        ended = max(ended, end)
    return ended


def calls_of(ledger: Ledger) -> list[Call]:
    return [Call("x", one.key, one.kv, lambda: None, (), {}) for one in ledger.launches if not one.within]


def simulated(ledger: Ledger, overlap: bool) -> float:
    return run([(work_of(call.key, call.nbytes), overlap) for call in calls_of(ledger)])


def clock(placed: Sequence[Placed], together: Any) -> float:
    return run([(work_of(one.call.key, one.call.nbytes), one.early) for one in placed])


def ledger_at(model: str, context: int, lanes: int = 1) -> Ledger:
    return ledger_of(sheet_at(model, 1, None), Shape(context, 3, lanes))


def measured(ledgers: Sequence[Ledger], edges: bool = True) -> LaunchTimes:
    """As `bench launches` would write it of these rounds, without chains."""
    found = Edges(clock, 1 << 30, 1 << 34, 64)
    launches = {}
    for ledger in ledgers:
        calls = calls_of(ledger)
        if edges:
            found.saved(windows(calls))
        for call in calls:
            launches[call.key, call.nbytes] = LaunchTime(
                call.key, call.nbytes, work_of(call.key, call.nbytes).seconds + START
            )
    return LaunchTimes(MACHINE, [one.label for one in ledgers], list(launches.values()), edges=found.found)


def predicted(ledger: Ledger, card: Card, overlap: bool = True) -> float:
    return forecast(ledger, card, Setting(overlap=overlap)).seconds


def test_a_round_of_launches_that_overlap_is_its_launches_less_what_edges_save() -> None:
    """At measured depths, between them, and of a model whose edges nobody has measured."""
    card = load_card("h200").with_launches(
        [measured([ledger_at("qwen3.8-27b", 8192), ledger_at("qwen3.8-27b", 131072)])]
    )
    card = type(card)(**{**vars(card), "gap_overlapped_us": 0.0, "gap_us": 0.0})
    for context in (8192, 65536, 131072):
        ledger = ledger_at("qwen3.8-27b", context)
        truth, in_turn = simulated(ledger, True), simulated(ledger, False)
        assert predicted(ledger, card, overlap=False) == pytest.approx(in_turn, rel=0.002)
        assert predicted(ledger, card) == pytest.approx(truth, rel=0.01)
        assert truth < 0.93 * in_turn  # what is told apart here is no trifle
    other = card.with_launches([
        measured([ledger_at("qwen3.8-27b", 8192)]), measured([ledger_at("dense-9b", c) for c in (8192, 131072)], False)
    ])  # fmt: skip
    for context in (8192, 32768):
        ledger = ledger_at("dense-9b", context)
        assert predicted(ledger, other) == pytest.approx(simulated(ledger, True), rel=0.02)


def test_two_predecessors_tell_more_than_one() -> None:
    """A norm lets the product behind it begin while the one before it still runs; pairs do not see that."""
    calls = [Call("x", key, 0.0, lambda: None, (), {}) for key in ("linear a", "rms_norm b", "swiglu c")]
    edges = Edges(clock, 1 << 30, 1 << 34, 64)
    both = edges.saved(windows(calls))
    alone = Edges(clock, 1 << 30, 1 << 34, 64)
    pairs = alone.saved(windows(calls[:2])) + alone.saved(windows(calls[1:]))
    whole = [
        run([(work_of(c.key, 0), early and place > 0) for place, c in enumerate(calls)]) for early in (False, True)
    ]
    assert both == pytest.approx(whole[0] - whole[1], rel=0.05)
    assert pairs < both - 0.1 * US
    assert [edge.after for edge in edges.found] == [["linear a"], ["rms_norm b", "linear a"]]


def test_what_was_not_measured_is_taken_from_its_kind_then_the_card_file() -> None:
    one, other = Edge("swiglu 1x", ["norm 5", "linear 7"], 3e-6), Edge("swiglu 2x", ["norm 5", "delta 7"], 1e-6)
    attention = [
        Edge("attention 1", ["rope 1", "linears 2"], saved, nbytes) for nbytes, saved in ((100, 2e-6), (300, -2e-6))
    ]
    found = savings_of([one, other, *attention], {"norm>linear": 5e-6})

    def of(*keys: str, kv: int = 0) -> float:
        launches = [launch_of(key, kv if not place else 0) for place, key in enumerate(keys)]
        return found.of(launches[0], launches[1:])

    assert of("swiglu 1x", "norm 5", "linear 7") == 3e-6
    assert of("swiglu 9x", "norm 9", "linear 9") == 3e-6  # the same three kernels
    assert of("swiglu 9x", "norm 9", "embed 9") == pytest.approx(2e-6)  # two of them: the mean
    assert of("linear 9x", "norm 9", "embed 9") == 5e-6 and of("embed 9x", "norm 9", "embed 9") == 0
    sizes = {50: 2e-6, 100: 2e-6, 200: 0.0, 300: -2e-6, 900: -2e-6}
    assert {kv: of("attention 1", "rope 1", "linears 2", kv=kv) for kv in sizes} == pytest.approx(sizes)
    assert not savings_of([], {}) and savings_of([], {"a>b": 1e-6})


def launch_of(key: str, kv: int) -> Any:
    """Of a key as two words."""

    @dataclass(frozen=True)
    class Named:
        key: str
        kernel: str
        kv: int

    return Named(key, key.partition(" ")[0], kv)


def asked(calls: Sequence[Call]) -> list[Work]:
    """The work of calls in a row where an exchange asks for what the product behind it reads, while it waits."""
    works = [work_of(call.key, call.nbytes) for call in calls]
    for place in range(1, len(calls)):
        if calls[place - 1].op == "reduce_norm" and calls[place].op in ("linears", "swiglu"):
            work = works[place]
            works[place] = Work(work.kernel, work.seconds - 1.3 * works[place - 1].seconds, work.own)
    return works


def simulate(monkeypatch: pytest.MonkeyPatch, idle: str = "", asking: bool = False) -> None:
    """Graphs are timed on the simulated card, with 20 us more to each as a whole; `idle`: a kernel that rests among others;
    `asking`: exchanges ask for what the next product reads."""

    def timed(launches: Any, device: Any, repeats: int = 0, together: Any = None, overlap: bool = False) -> Timing:
        works, calls = [], [one.call if isinstance(one, Placed) else one for one in launches]
        each = asked(calls) if asking else [work_of(call.key, call.nbytes) for call in calls]
        for one, call, work in zip(launches, calls, each, strict=True):
            early = one.early if isinstance(one, Placed) else overlap
            assert together is not None or not call.is_exchange  # an exchange takes both ranks
            if idle and call.key.startswith(idle) and len({other.key for other in calls}) > 1:
                work = Work(work.kernel, 0.5 * US, 0.1 * US)
            works.append((work, early))
            if call.op == "elementwise":  # torch's own two
                works.append((work, False))
        return Timing((run(works) + 20 * US) / len(launches), 0.01)

    monkeypatch.setattr(launch_measure, "time_queued", timed)
    monkeypatch.setattr(launch_measure, "TO_TRY", launch_measure.Amounts(1, 1, 60, 8))
    torch.set_num_threads(1)


@torch.inference_mode()
def test_a_subject_is_measured_edge_by_edge_and_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own calls on the simulated card: the round that it forecasts is the one that the card would take."""
    simulate(monkeypatch)
    model, found = model_at("tiny", 1, None), Found()
    subject = Subject(model, 0, lone(model), Wanted([100, 1500], 2), CPU)
    measure_subject(subject, found, Costs(20 * US), None, lambda one: None)
    (chain,) = found.chains
    assert chain.gap == pytest.approx(0, abs=0.05 * US)
    assert chain.gap_overlapped == pytest.approx(0, abs=0.15 * US)
    assert chain.saved > 0.05 * chain.alone
    card = load_card("h200").with_launches(
        [LaunchTimes(MACHINE, ["tiny"], found.launches, found.chains, edges=found.edges)]
    )
    for context in (100, 800):
        ledger = ledger_of(sheet_at("tiny", 1, None), Shape(context, 2))
        assert predicted(ledger, card) == pytest.approx(simulated(ledger, True), rel=0.02)
        assert predicted(ledger, card, overlap=False) == pytest.approx(simulated(ledger, False), rel=0.01)
    keys = [(edge.key, *edge.after) for edge in found.edges]
    repeated = {key for key in keys if keys.count(key) > 1}
    assert repeated and all("attention_int8" in " ".join(key) for key in repeated)  # only what reads keys goes by depth


@torch.inference_mode()
def test_every_graph_begins_where_the_round_has_left_its_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often bookkeeping was called before; else lanes are past their limits, and what attends to them does nothing."""
    seen: list[str] = []

    def timed(launches: Any, device: Any, repeats: int = 0, together: Any = None, overlap: bool = False) -> Timing:
        for one in launches:
            call = one.call if isinstance(one, Placed) else one
            if call.op == "decode_attention":
                assert describe(call.op, call.args, call.kwargs)[1] == pytest.approx(call.nbytes, rel=0.05)
            if call.op == "delta_decode":
                (batch,) = (part for part in (*call.args, *call.kwargs.values()) if isinstance(part, DeltaRound))
                assert batch.counts.tolist() == [3] and batch.lanes.tolist() == [0]
            seen.append(call.op)
            if call.op in ("round_rows", "round_advance"):
                one()
        return Timing(10 * US, 0.0)

    monkeypatch.setattr(launch_measure, "time_queued", timed)
    model, found = model_at("tiny", 1, None), Found()
    subject = Subject(model, 0, lone(model), Wanted([100, 300], 2), CPU)
    measure_subject(subject, found, Costs(0.0), None, lambda one: None)
    last = max(place for place, op in enumerate(seen) if op == "round_advance")
    assert {"decode_attention", "delta_decode"} <= set(seen[last:])  # at another depth
    assert len(found.chains) == 1 and not found.refused


@torch.inference_mode()
def test_what_takes_less_in_turn_than_one_by_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which a product rests unless it is alone."""
    simulate(monkeypatch, "swiglu")
    model, found = model_at("tiny", 1, None), Found()
    subject = Subject(model, 0, lone(model), Wanted([100], 2), CPU)
    measure_subject(subject, found, Costs(20 * US), None, lambda one: None)
    *edges, chain = found.refused
    assert not found.chains and "calls in a row" in chain and "did less than in a round" in chain
    assert edges and all("swiglu" in line and "in turn" in line for line in edges)
    named = {tuple(line.partition(": in turn")[0].split(" > ")) for line in edges}
    assert not named & {(*reversed(edge.after), edge.key) for edge in found.edges}
    assert found.edges and all(edge.in_turn > 0 for edge in found.edges)


def test_layers_in_a_row_that_are_too_fast_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an older file, to forecasts and card files."""
    good = Chain("tiny, recipe v100", 1, 10, 104e-6, 100e-6, overlapped=95e-6, saved=10e-6)
    odd = Chain("tiny, recipe v100", 1, 10, 90e-6, 100e-6, overlapped=85e-6, saved=10e-6)
    plain, ledger = load_card("h200"), ledger_of(sheet_at("tiny", 1, None), Shape(100, 2))
    for chains, gap in (([odd], plain.gap_us * US), ([good, odd], 0.4 * US)):
        times = LaunchTimes(MACHINE, ["tiny"], [LaunchTime("rms_norm 5 T4 x1", 0.0, 2e-6)], chains)
        assert plain.with_launches([times]).gap(ledger) == pytest.approx(gap)
        made = sections([times])
        assert ("gap_us = 0.40" in made) == (good in chains)
        told = [line for line in made.splitlines() if line.startswith("# left out, tiny, ")]
        assert len(told) == sum(bool(chain.fault) for chain in chains) and all("did less than" in line for line in told)
    file = tmp_path / "old.json"
    file.write_bytes(times.encode())
    assert (
        main(["predict", "tiny", "--card", "h200", "--drafts", "2", "--context", "100", "--launches", str(file)]) == 0
    )
    assert (out := capsys.readouterr().out).count("left out, tiny") == 1 and "did less than in a round" in out


@torch.inference_mode()
@pytest.mark.parametrize("norming", [True, False])
def test_exchanges_have_edges_too(monkeypatch: pytest.MonkeyPatch, norming: bool) -> None:
    """Of two ranks, with sums that go on to a norm and with those that do not."""
    simulate(monkeypatch)
    model, found = model_at("tiny", 2, None), Found()
    subject = Subject(model, 0, Halves(norming), Wanted([100], 1), CPU)
    measure_subject(subject, found, Costs(20 * US), Together(lambda: None, lambda: None), lambda one: None)
    card = load_card("h200").with_launches([LaunchTimes(MACHINE, [], found.launches, found.chains, edges=found.edges)])
    assert any(edge.key.startswith("reduce_norm " if norming else "reduce ") for edge in found.edges)
    ledger = ledger_of(sheet_at("tiny", 2, None), Shape(100, 1))
    calls = [Call("x", one.key, one.kv, lambda: None, (), {}) for one in card.calls(ledger)]
    truth = [run([(work_of(call.key, call.nbytes), overlap) for call in calls]) for overlap in (False, True)]
    found_here = [forecast(ledger, card, Setting(link="measured", overlap=way)).seconds for way in (False, True)]
    assert found_here == pytest.approx(truth, rel=0.02) and truth[1] < 0.95 * truth[0]


@torch.inference_mode()
def test_exchanges_that_ask_for_weights_make_the_next_product_faster_than_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is no sign of calls that did less: edges and layers in a row stay, and forecasts count what asking saves."""
    simulate(monkeypatch, asking=True)
    model, found = model_at("tiny", 2, None), Found()
    subject = Subject(model, 0, Halves(True), Wanted([100], 1), CPU)
    subject.amounts = launch_measure.Amounts(1, 1, 60, 8)  # what is impossible is refused
    measure_subject(subject, found, Costs(20 * US), Together(lambda: None, lambda: None), lambda one: None)
    (chain,) = found.chains
    assert not found.refused and not chain.fault
    assert chain.seconds < 0.97 * chain.alone and 0 < chain.asking < 0.2 * chain.alone  # the old bound
    read = [
        edge
        for edge in found.edges
        if edge.key.startswith(("linears", "swiglu")) and edge.after[0].startswith("reduce_norm")
    ]
    assert len(read) >= 2
    times = LaunchTimes(MACHINE, [], found.launches, found.chains, edges=found.edges)
    card = load_card("h200").with_launches([times])
    ledger = ledger_of(sheet_at("tiny", 2, None), Shape(100, 1))
    calls = [Call(one.kernel, one.key, one.kv, lambda: None, (), {}) for one in card.calls(ledger)]
    for overlap in (False, True):
        truth = run([(work, overlap) for work in asked(calls)])
        without = run([(work_of(call.key, call.nbytes), overlap) for call in calls])
        ours = forecast(ledger, card, Setting(link="measured", overlap=overlap)).seconds
        assert ours == pytest.approx(truth, rel=0.03) and truth < 0.97 * without
    again = replace(chain, seconds=0.9 * (chain.alone - chain.asking))
    assert "did less than in a round" in again.fault  # beyond what asking can save


@pytest.mark.parametrize("asking", [-1e-9, 2e-5, float("nan")])
def test_exchanges_of_a_chain_are_part_of_it(asking: float) -> None:
    with pytest.raises(ValueError, match="exchanges of a chain"):
        Chain("m", 2, 2, 1e-5, 1e-5, asking=asking)


def test_edges_of_a_busy_host_are_left_out() -> None:
    calls = [Call("x", f"linear {name}", 0.0, lambda: None, (), {}) for name in "abc"]
    edges = Edges(lambda placed, together: float("nan"), 1, 1, 2)
    assert edges.saved(windows(calls)) == 0 and edges.found == []


def test_an_edge_that_saves_more_than_all_takes_is_a_line_and_the_others_stay() -> None:
    """A window that was disturbed: begun early it seems to take less than no time."""
    calls = [Call("x", f"linear {name}", 0.0, lambda: None, (), {}) for name in "abc"]

    def disturbed(placed: Sequence[Placed], together: Any) -> float:
        last, early = placed[-1], any(one.early for one in placed)
        return -5e-5 if early and last.call.key == "linear c" else (8e-6 if early else 1e-5) * len(placed)

    edges = Edges(disturbed, 1, 1, 2)
    for _ in range(2):  # asked again, as a chain does, it says so once
        assert edges.saved(windows(calls)) > 0
    assert [edge.key for edge in edges.found] == ["linear b"]
    (line,) = edges.refused
    assert line.startswith("linear a > linear b > linear c: in turn ") and "saves no more than" in line


def test_from_a_measurement_to_a_card_file_to_a_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands as on a card, without one: times are this host's, so that only the way is looked at."""
    out = tmp_path / "launches.json"

    def timed(launches: Any, device: Any, repeats: int = 0, together: Any = None, overlap: bool = False) -> Timing:
        early = sum(one.early if isinstance(one, Placed) else overlap for one in launches)
        return Timing(6e-6 - 1e-6 * early / len(launches), 0.0)

    monkeypatch.setattr(launch_measure, "time_queued", timed)
    command = [
        "bench",
        "launches",
        "tiny",
        "--devices",
        "cpu",
        "--drafts",
        "1",
        "--contexts",
        "100",
        "--json",
        str(out),
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "edges save" in printed and "between rounds 0.00 us" in printed
    times = read_launch_times(out)
    assert times.edges and times.chains[0].overlapped and times.machine.card.startswith("none")
    assert main(["bench", "launches", "--card-file", str(out)]) == 0
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\nsource = "x"\nassumed = "y"\n[read]\ngbps = 4000\nstart_us = 2\n' + _tables(capsys))
    base = ["predict", "tiny", "--drafts", "1", "--context", "100"]
    written = {}
    for name, words in {
        "launches": ["--card", "h200", "--launches", str(out)],
        "card": ["--card", str(own)],
        "serial": ["--card", str(own), "--graphs", "serial"],
    }.items():
        assert main([*base, *words, "--write", str(tmp_path / f"{name}.json")]) == 0
        written[name] = json.loads((tmp_path / f"{name}.json").read_text())["rounds"][0]
        assert "launches in turn: what" not in capsys.readouterr().out
    assert written["launches"]["families"]["overlap"] < 0 and written["card"]["families"]["overlap"] < 0
    assert "overlap" not in written["serial"]["families"]
    assert [written[name]["graphs"] for name in ("card", "serial")] == ["on", "serial"]
    assert main([*base, "--card", "v100-877"]) == 0
    assert "launches in turn: what" in capsys.readouterr().out


def _tables(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.replace("[small]", "[small]\nnode_us = 1\nkernel_us = 2")


def test_the_sections_of_a_card_file() -> None:
    chain = Chain("m", 1, 10, 120e-6, 100e-6, overlapped=95e-6, saved=10e-6)
    launches = [LaunchTime("rms_norm 5 T4 x1", 0.0, 2e-6), LaunchTime("rms_norm 4 T4 x1", 0.0, 3e-6)]
    edges = [Edge("linear 1", ["rms_norm 5"], 2e-6), Edge("linear 2", ["rms_norm 5", "linear 1"], 1e-6)]
    lines = sections([LaunchTimes(MACHINE, ["m"], launches, [chain], edges=edges)]).splitlines()
    assert {"gap_us = 2.00", "gap_overlapped_us = 0.50", "rms_norm = 2.5", '"rms_norm>linear" = 1.50'} <= set(lines)
    assert "NVIDIA H200, memory at 3201 MHz, driver 580.1" in lines[0]


def test_names_of_a_file_stay_within_the_remarks_of_a_card_file() -> None:
    odd = Chain("m\n[small]\ngap_us = 9", 1, 10, 90e-6, 100e-6)
    made = sections([LaunchTimes(MACHINE, ["m\nx = 1"], [], [odd])])
    assert tomllib.loads(made) == {"kernel_us": {}} and made.count("left out") == 1


def test_rounds_in_turn_are_not_held_to_forecasts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {}
    for graphs in ("on", "serial"):
        files[graphs] = tmp_path / f"{graphs}.json"
        command = ["predict", "qwen3.8-27b", "--card", "h200", "--drafts", "3", "--context", "8192", "--graphs", graphs]
        assert main([*command, "--write", str(files[graphs])]) == 0
    rounds = tmp_path / "rounds.json"
    row = {"context": 8192, "drafts": 3, "ms": 9.0}
    rounds.write_text(json.dumps({"graphs": "on", "rounds": [row]}))
    capsys.readouterr()
    assert main(["predict", "--check", str(rounds), "--against", str(files["serial"])]) == 2
    assert "--graphs must agree" in capsys.readouterr().err
    assert main(["predict", "--check", str(rounds), "--against", *map(str, files.values())]) == 0
    assert "1 rounds" in (out := capsys.readouterr().out) and "graphs on" in out


@pytest.mark.parametrize(
    ("cards", "constant", "median", "worst"), [("one-card", 0.30, 1.5, 2.0), ("two-cards", 0.11, 0.8, 1.1)]
)
def test_on_paper(cards: str, constant: float, median: float, worst: float) -> None:
    """docs/predict.md: kernels' times in turn and one constant a launch, of the first row, beside rounds that overlap."""
    path = Path(__file__).parents[2] / "docs" / "measured" / f"h200-engine-{cards}.json"
    rows = json.loads(path.read_text())["rounds"]
    busy = [sum(row["families"].values()) for row in rows]
    launches = [sum(count for count, _ in row["kernels"].values()) for row in rows]
    each = (rows[0]["ms"] - busy[0]) / launches[0]
    errors = []
    for row, ms, count in zip(rows, busy, launches, strict=True):
        errors.append(100 * ((ms + each * count) / row["ms"] - 1))
        print(
            f"{row['context']:>8,} x {row['lanes']}: {ms + each * count:6.2f} ms, {row['ms']:6.2f} measured, {errors[-1]:+.1f} %"
        )
    sizes = sorted(abs(error) for error in errors[1:])
    found = 1e3 * each, statistics.median(sizes), sizes[-1]
    assert found == pytest.approx((constant, median, worst), abs=0.06)


@pytest.mark.parametrize(
    "content",
    [
        {"key": "a", "after": [], "saved": 1e-6},
        {"key": "a", "after": ["b"], "saved": 100.0},
        {"key": "a", "after": ["b"], "saved": 1e-6, "nbytes": -1},
        {"key": "a", "after": "b", "saved": 1e-6},
        {"key": "a", "after": ["b"], "saved": 1e-6, "in_turn": 61},
        {"key": "a", "after": ["b"], "saved": 3e-6, "in_turn": 2e-6},
    ],
)
def test_edges_that_cannot_be_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    good = json.loads(LaunchTimes(MACHINE, [], [], edges=[Edge("a", ["b"], 1e-6)]).encode())
    path.write_text(json.dumps(good))
    assert read_launch_times(path).edges[0].saved == 1e-6
    path.write_text(json.dumps(good | {"edges": [content]}))
    with pytest.raises(InputError, match="not a file of `duovolt bench launches"):
        read_launch_times(path)


@pytest.mark.parametrize(
    "content",
    [
        {"launches": [{"key": "a", "nbytes": 0, "seconds": 1e300}]},
        {"chains": [{"model": "m", "tp": 1, "calls": 2, "seconds": 1e-5, "alone": 1e-5, "saved": -1}]},
    ],
)
def test_launches_that_cannot_be_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(json.loads(LaunchTimes(MACHINE, [], []).encode()) | content))
    with pytest.raises(InputError, match=r"a launch takes less|edges of a chain save no more"):
        read_launch_times(path)


def test_a_card_file_with_an_odd_edge_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = (
        'name = "o"\nsource = "x"\nassumed = "y"\n[read]\ngbps = 1\nstart_us = 2\n[small]\nnode_us = 1\nkernel_us = 2\n'
    )
    own.write_text(text + '[overlap]\n"a>b" = 1.5\n')
    assert load_card(str(own)).savings.table == {"a>b": 1.5e-6}
    for line in ('"ab" = 1.5', '"a>b" = nan', '"a>b" = 1e9'):
        own.write_text(text + f"[overlap]\n{line}\n")
        with pytest.raises(InputError, match="overlap"):
            load_card(str(own))


def test_without_a_card_calls_are_timed_on_the_host() -> None:
    called = []
    timing = time_queued([lambda: called.append(1)] * 4, CPU)
    assert timing.seconds > 0 and len(called) >= 4 and not timing.dry
    assert machine_of(CPU).driver is None
