"""`bench launches`: every kernel of a round is set up at its real shape; forecasts take what was measured."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from duovolt.checkpoint.errors import CheckFailed, InputError
from duovolt.cli.main import main
from duovolt.kernels import norm
from duovolt.perf import launch_measure, launch_pair
from duovolt.perf.cards import load_card
from duovolt.perf.device_timing import Timing
from duovolt.perf.launch_file import Chain, Edge, LaunchTime, LaunchTimes, at_bytes, coverage, read_launch_times
from duovolt.perf.launch_measure import Costs, Found, Subject, Wanted, layers_of, lone, measure_subject, shortened
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.machine import Machine
from duovolt.perf.model_source import model_at, sheet_at
from duovolt.perf.pair import Partner
from duovolt.perf.predict import Setting, forecast
from duovolt.runtime.parallel.region import region_bytes
from duovolt.runtime.parallel.shared import SharedFile

MACHINE = Machine(
    card="NVIDIA H200", capability=(9, 0), multiprocessors=132, core_mhz=1980, memory_mhz=3201, bus_bits=6144,
    l2_bytes=1, memory_bytes=1, driver="580.1", torch="2.11", cuda="13.0", duovolt="0", date="2026-01-01",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Halves:
    """A link of two ranks that are alike; with `norming`, it goes on to the norm behind a sum, as the mailbox does."""

    def __init__(self, norming: bool) -> None:
        self.rank, self.size, self.name, self.halves = 0, 2, "ipc", False
        if norming:
            self.reduce_norm = self._reduce_norm

    def reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * part.float())

    reduce_large = reduce

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.cat((part, part), dim=1))

    def _reduce_norm(
        self,
        part: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        overflows: Any,
        then: Sequence[Any] = (),
    ) -> None:
        norm.rms_norm_reference(x, weight, eps, delta=2 * part.float(), out=out, overflows=overflows)

    def check(self) -> None:
        return None


def subject(tp: int = 1, link: Any = None, wanted: Wanted | None = None) -> Subject:
    model = model_at("tiny", tp, None)
    return Subject(model, 0, link or lone(model), wanted or Wanted([100], 2, 2), CPU)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("tp", "norming", "kv"), [(1, False, "int8"), (1, False, "fp16"), (2, False, "int8"), (2, True, "int8")]
)
def test_the_ledger_has_the_launches_that_the_engine_makes(tp: int, norming: bool, kv: str) -> None:
    """Every call of a round, by its shapes and in its order, drafts and exchanges included."""
    own = subject(tp, Halves(norming) if tp == 2 else None, Wanted([100], 2, 2, kv))
    (calls,) = own.rounds()
    ledger = ledger_of(shortened(own.model).sheet(), Shape(100, 2, 2, kv))
    within = {"attention_int8", "attention_fp16", "sampling_adjust", *(["reduce_norm"] if norming else [])}
    counted = [launch.key for launch in ledger.launches if launch.within not in within]
    if not norming:
        counted = [key.replace("reduce_norm", "reduce") for key in counted]
    staging = [key for key in counted if key.startswith("elementwise")]
    assert len(staging) == 2 and staging[0] == calls[-1].key  # of one call
    made = [call.key for call in calls[:-1]]
    assert made == [key for key in counted if key not in staging]
    assert [round(call.nbytes) for call in calls if call.op == "decode_attention"][-1] == pytest.approx(
        next(launch.kv for launch in ledger.launches if launch.family == "attention" and launch.part == "verify"),
        rel=0.2,
    )


@torch.inference_mode()
def test_an_exchange_names_the_matrices_that_the_next_launch_reads() -> None:
    """Where the norm behind a sum is in the same launch: all but the last of a pass, which the head comes behind."""
    (calls,) = subject(2, Halves(norming=True), Wanted([100], 2, 2, "int8")).rounds()
    exchanges = [place for place, call in enumerate(calls) if call.op == "reduce_norm"]
    assert {calls[place + 1].op for place in exchanges} == {"linears", "swiglu"}
    assert all(place - 1 in exchanges for place, call in enumerate(calls) if call.op == "swiglu")
    for place in exchanges:
        *_, named = calls[place].args
        following = calls[place + 1]
        read = following.args[1] if following.op == "linears" else following.args[1:3]
        assert len(named) == len(read) and all(one is other for one, other in zip(named, read, strict=True))
        assert calls[place].cold_reads == 0  # they are the next launch's


@torch.inference_mode()
def test_a_copied_call_has_memory_of_its_own() -> None:
    (calls,) = subject().rounds()
    for call in calls:
        made: dict[int, Any] = {}
        other = call.copied(made)
        assert other.key == call.key and other.cold_bytes == call.cold_bytes
        mine, theirs = ({part.data_ptr() for part in one.cold_tensors()} for one in (call, other))
        assert not mine & theirs and len(mine) == len(theirs)
        assert (
            call.copied(made).cold_tensors() == []
            or {part.data_ptr() for part in call.copied(made).cold_tensors()} == theirs
        )  # what calls share is copied once
        if call.op in ("linear", "linears", "swiglu", "decode_attention"):
            first, second = call(), other()
            for left, right in zip(*(x if isinstance(x, list) else [x] for x in (first, second)), strict=True):
                assert torch.equal(left, right), call.key
    assert {call.op for call in calls if call.cold_reads} == {
        "linear",
        "linears",
        "swiglu",
        "decode_attention",
        "delta_decode",
    }


@torch.inference_mode()
def test_every_call_is_timed_once_and_the_layers_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that gives every launch 10 us, and 20 us more to a graph as a whole."""
    sizes: list[int] = []

    def clock(
        launches: Any, device: torch.device, repeats: int = 0, together: Any = None, overlap: bool = False
    ) -> Timing:
        assert not overlap  # edges tell what overlap saves
        sizes.append(len(launches))
        return Timing(10e-6 + 20e-6 / len(launches), 0.01)

    monkeypatch.setattr(launch_measure, "time_queued", clock)
    own, found, told = subject(wanted=Wanted([100, 150], 2, 1, overlap=False)), Found(), []
    measure_subject(own, found, Costs(20e-6), None, told.append)
    keys = [one.key for one in told]
    assert len(keys) - len(set(keys)) == 2  # only attention, of the pass and of a draft, goes by depth
    for one in told:
        assert one.seconds == pytest.approx(5e-6 if one.key.startswith("elementwise") else 10e-6)
    (chain,) = found.chains
    (calls, _) = own.rounds()
    assert (
        chain.calls == len(layers_of(calls)) == 4 * 6 + 3 * 2 + 2 + 1
    )  # a layer: two norms, four products; final norm
    assert chain.seconds == pytest.approx(chain.alone) and chain.gap == pytest.approx(0, abs=1e-12)
    assert min(sizes) >= 2


def test_the_slower_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in two threads, on a link without a device."""
    shared, closed = SharedFile.create(region_bytes()), []
    saved: list[dict[str, float]] = []

    class Link(Halves):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(launch_pair, "open_way", lambda *given: Link(True))

    def rank(number: int, seconds: list[float]) -> list[LaunchTime]:
        pair = launch_pair.Pair(Partner.first(shared.name), number, "ipc,peer", CPU)
        pair.together.exchange()
        found = pair.slower([LaunchTime(f"linear {place}", 0.0, one) for place, one in enumerate(seconds)])
        edges = [Edge("linear", [f"norm {place}"], one) for place, one in enumerate(seconds) if one]
        saved.append({edge.after[0]: edge.saved for edge in pair.lesser(edges)})
        pair.close()
        return found

    with ThreadPoolExecutor() as threads:
        both = [threads.submit(rank, number, one) for number, one in enumerate(([1.0, 3.0, 0.0], [2.0, 2.0, 5.0]))]
        results = [one.result() for one in both]
        assert results[0] == results[1] and [one.seconds for one in results[0]] == [2.0, 3.0, 0.0]  # 0: not measured
        assert len(closed) == 2
        assert saved == [{"norm 0": 1.0, "norm 1": 2.0}] * 2  # what both have measured, on the rank where it is less
        both = [threads.submit(rank, number, [1.0] * (1 + number)) for number in (0, 1)]
        for one in both:
            with pytest.raises(CheckFailed, match="different launches"):
                one.result()
    shared.unlink()


def test_a_shortened_model_has_every_kind_of_layer() -> None:
    model = model_at("qwen3.8-27b", 1, None)
    short = shortened(model)
    assert len(short.config.text.layer_types) == 4 and short.config.text.hidden_size == 5120
    name = "model.language_model.layers.9.mlp.down_proj.weight"
    odd = shortened(with_field(model, encodings=model.encodings | {name: "fp8_e4m3"}))
    assert len(odd.config.text.layer_types) == 10
    counted = {launch.key for launch in ledger_of(short.sheet(), Shape(8192, 3)).launches}
    assert counted == {launch.key for launch in ledger_of(model.sheet(), Shape(8192, 3)).launches}


def test_a_round_has_the_launches_that_a_profile_counted() -> None:
    """598 kernels and copies of a round of the 27B on one H200: all but the copy of the report to the host."""
    ledger = ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(8192, 3))
    counts: dict[str, int] = {}
    for launch in ledger.launches:
        counts[launch.kernel] = counts.get(launch.kernel, 0) + 1
    assert len(ledger.launches) == 593
    assert counts["rms_norm"] == 144 and counts["delta_decode"] == counts["gated_rms_norm"] == 48
    assert counts["linear"] + counts["linears"] + counts["swiglu"] == 134 + 93 + 48
    assert counts["attention_int8"] == counts["qkv_rope_int8"] == counts["attention_merge"] == 19


def times_of(tmp_path: Path, scale: float = 1.0) -> Path:
    launches = []
    for context in (8192, 32768):
        ledger = ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(context, 3))
        for key, launch in {(one.key, one.moved): one for one in ledger.launches if not one.within}.items():
            launches.append(LaunchTime(key[0], launch.moved, scale * (1e-6 + launch.moved / 1e12)))
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
        within = sum(bool(launch.within) for launch in ledger.launches)
        assert coverage(ledger.launches, card.exact) == (len(own) + within, 593) == (593, 593)
    command = ["predict", "qwen3.8-27b", "--card", "h200", "--drafts", "3", "--context", "8192"]
    assert main([*command, "--launches", str(path)]) == 0
    out = capsys.readouterr().out
    assert "of 593 launches were measured" in out and "measured on NVIDIA H200, memory at" in out


def test_gaps_and_exchanges_are_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = ledger_of(sheet_at("qwen3.8-27b", 2, None), Shape(8192, 3))
    keys = {launch.key for launch in ledger.launches if not launch.within}
    launches = [LaunchTime(key, 0.0, 3e-6) for key in keys]
    chains = [Chain("qwen3.8-27b, recipe v100", 2, 50, 200e-6, 150e-6), Chain("another", 2, 50, 1e-3, 1e-6)]
    chains.insert(1, replace(chains[0], seconds=1e-3, lanes=2))
    card = load_card("h200").with_launches([LaunchTimes(MACHINE, [], launches, chains, 7e-6)])
    found = forecast(ledger, card, Setting(link="measured"))
    calls = sum(not launch.within for launch in ledger.launches)
    assert calls == 731 - 19 - 4 - (134 - 4)  # merges, one of two samplers a draw, norms behind a sum but for last ones
    assert found.seconds == pytest.approx(calls * 4e-6 + 7e-6)
    assert found.families["gaps"][2] == pytest.approx(calls * 1e-6) and found.families["replay"][2] == 7e-6
    path = tmp_path / "two.json"
    path.write_bytes(LaunchTimes(MACHINE, [], launches, chains, 7e-6).encode())
    command = ["predict", "qwen3.8-27b", "--card", "h200", "--drafts", "3", "--context", "8192"]
    command += ["--tp", "2", "--graphs", "serial"]
    assert main([*command, "--launches", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "731 of 731 launches were measured" in out
        and "link measured" in out
        and f"{found.seconds * 1e3:.2f} ms a round" in out
    )
    assert main([*command, "--launches", str(path), "--what-if"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  if ")]
    told = {line[5:41].strip(): (float(line[41:49]), line.endswith("by the card file")) for line in lines}
    whole = found.seconds * 1e3
    assert told["messages that cost nothing"][0] < whole and not told["messages that cost nothing"][1]
    assert told["5 drafts, same acceptance"][1] and whole < told["5 drafts, same acceptance"][0] < 2 * whole
    assert told["fp16 KV"][1] and told["fp16 KV"][0] == pytest.approx(whole, rel=0.2)
    apart = [replace(one, key=one.key.replace("reduce_norm", "reduce")) for one in launches]
    apart += [LaunchTime(f"rms_norm_delta 5120 T{tokens} x1", 0.0, 2e-6) for tokens in (1, 4)]
    other = load_card("h200").with_launches([LaunchTimes(MACHINE, [], apart)])  # as NCCL: a norm of its own
    assert forecast(ledger, other, Setting(link="measured")).families["small"][2] > found.families["small"][2]
    with pytest.raises(InputError, match="was not measured between two cards"):
        forecast(ledger, load_card("h200"), Setting(link="measured"))


@pytest.mark.parametrize(
    "line", ["--contexts 1", "--drafts 9", "--lanes 0", "--devices 0,1,2", "--devices x", "--tp 0"]
)
def test_what_makes_no_sense_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "launches", "tiny", *line.split()]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_times_between_and_beyond_measured_sizes() -> None:
    points = [(100.0, 2.0), (200.0, 3.0), (400.0, 4.0)]
    assert [at_bytes(points, nbytes) for nbytes in (100, 150, 300, 600)] == [2.0, 2.5, 3.5, 5.0]
    assert at_bytes([(0.0, 2.0)], 150) == 2.0  # of one size
    assert at_bytes([(100.0, 2.0)], 104) == 2.0 and at_bytes([(100.0, 2.0)], 150) is None


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
