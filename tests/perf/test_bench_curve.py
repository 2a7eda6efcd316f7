"""`bench curve` with a made-up card: what is measured, what gets no number, what the table and the plot say."""

import json
import math

import msgspec
import pytest
import torch

from duovolt.cli.main import main
from duovolt.perf import curve_measure
from duovolt.perf.curve import Curve, read_curve
from duovolt.perf.curve_measure import KERNELS, Bench, Wanted, bytes_a_row, cut, measure_curve, refusal, sizes
from duovolt.perf.curve_report import verdicts
from duovolt.perf.device_timing import Timing

from .test_curve import MACHINE

NODE = 1e-6
CONSTANT, RATE = 3e-6, 900e9
CARD = msgspec.structs.replace(MACHINE, l2_bytes=1 << 16)


class Card:
    """Answers a time a launch from the bytes it reads; `slowed` gives extra seconds to some."""

    def __init__(self):
        self.slowed = lambda call, nbytes: 0.0
        self.dry = False

    def time(self, calls, device, repeats) -> Timing:
        if self.dry:
            return Timing(math.nan, math.nan, dry=True)
        call = calls[0]
        if call.func.__name__ == "linears":
            nbytes = call.args[1][0].nbytes
        else:
            nbytes = 16 * call.args[3][2]
        return Timing(CONSTANT + nbytes / RATE + self.slowed(call, nbytes), 0.01)


@pytest.fixture
def card(monkeypatch) -> Card:
    card = Card()

    class Module:
        arch = "sm_70"

        def launch(self, *arguments):
            raise AssertionError("only timed")

    monkeypatch.setattr(curve_measure, "time_queued", card.time)
    monkeypatch.setattr(curve_measure, "node_cost", lambda device, repeats: Timing(NODE, 0.0, card.dry))
    monkeypatch.setattr(curve_measure, "load", lambda source, device: Module())
    monkeypatch.setattr(curve_measure, "multiprocessors", lambda device: 72)
    monkeypatch.setattr(curve_measure, "prepare", lambda device: None)
    monkeypatch.setattr(curve_measure, "read_machine", lambda device: CARD)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 20, 32 << 30))
    monkeypatch.setattr(curve_measure, "LARGEST", 4 << 20)
    monkeypatch.setattr(curve_measure, "sizes", lambda steps: sizes(steps, 1 << 19, 4 << 20))
    monkeypatch.setattr(curve_measure, "ROW_LENGTH_BYTES", (1 << 20,))
    monkeypatch.setattr(curve_measure, "TOKEN_BYTES", (1 << 20, 2 << 20))
    monkeypatch.setattr("duovolt.cli.bench_curve.the_device", lambda: torch.device("cpu"))
    return card


def measured(*kernels: str, **wanted) -> Curve:
    return measure_curve(torch.device("cpu"), Wanted(kernels or KERNELS, **wanted), lambda text: None)


def test_sizes_go_from_half_a_megabyte_to_a_gigabyte():
    assert (sizes(2)[0], sizes(2)[-1], len(sizes(2)), len(sizes(4))) == (1 << 19, 1 << 30, 23, 45)


@pytest.mark.parametrize("encoding", curve_measure.ENCODINGS)
def test_weights_of_a_pool_neither_overlap_nor_leave_room_for_one_more(encoding):
    pool = torch.zeros(1 << 20, dtype=torch.uint8)
    weights = cut(pool, encoding, 96, 256)
    assert weights[0].shape == (96, 256)
    assert weights[0].nbytes == pytest.approx(96 * bytes_a_row(encoding, 256), abs=32)
    for weight in weights:
        for name in ("words", "block_scale", "scale"):
            part = getattr(weight, name, None)
            if part is not None and part.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr():
                flat = part.view(-1).view(torch.uint8)
                assert flat.sum() == 0, "two weights share bytes"
                flat.fill_(1)
    assert len(weights) == pytest.approx((1 << 20) / weights[0].nbytes, rel=0.1)
    assert int(pool.sum()) > (1 << 20) - 2 * weights[0].nbytes


def test_a_curve_holds_the_law_of_the_card_and_what_is_left_without_the_node(card):
    curve = measured()
    assert [one.kernel for one in curve.series if one.columns in (0, 5120) and one.tokens < 2] == list(KERNELS)
    for series in curve.series:
        assert series.points and not series.refused
        for point in series.points:
            assert point.seconds == pytest.approx(CONSTANT + point.nbytes / RATE)
            assert point.nbytes / point.net_gbps / 1e9 == pytest.approx(point.seconds - NODE)
    assert curve.node_us == pytest.approx(1e6 * NODE) and curve.machine is CARD
    fp8 = [(one.columns, one.tokens) for one in curve.series if one.kernel == "fp8"]
    assert fp8 == [(5120, 1), (1024, 1), (4096, 1), (16384, 1), (5120, 2), (5120, 4), (5120, 8)]
    assert len(measured(variations=False).series) == len(KERNELS)


def test_what_limits_an_encoding_is_told_from_its_variations(card):
    assert all("not what limits it" in one or "does not limit" in one for one in verdicts(measured("fp8")))
    card.slowed = lambda call, nbytes: 2e-6 * (call.args[0].shape[1] / 16384 + call.args[0].shape[0] / 8)
    row, tokens = verdicts(measured("fp8"))
    assert "1.1 MB" in row and "part of what limits it" in row and "at K 16384" in row
    assert "arithmetic takes part" in tokens and "T 8" in tokens


def test_a_size_that_the_cache_or_the_host_explains_gets_no_number(card, monkeypatch):
    timing = Timing(1e-5, 0.01)
    assert refusal(1 << 20, timing, 16 * CARD.l2_bytes, CARD) is None
    assert "pool too small" in refusal(1 << 20, timing, 16 * CARD.l2_bytes - 1, CARD)
    assert "more than the memory gives on paper (1134)" in refusal(12_000_000, timing, 1 << 30, CARD)
    assert "queue ran dry" in refusal(1 << 20, Timing(math.nan, math.nan, dry=True), 1 << 30, CARD)
    small = measured("read", pool_bytes=2_000_000)  # holds no two of more than 1 MB
    (series,) = small.series
    assert [round(p.nbytes / 1e6, 1) for p in series.points] == [0.5, 0.7]
    assert {one.why for one in series.refused} == {"pool too small: two do not fit its 2 MB"}
    monkeypatch.setattr(curve_measure, "read_machine", lambda device: MACHINE)  # 6 MB of L2
    assert all("L2 cache keeps 6" in one.why for one in measured("read").series[0].refused)
    assert not measured("read").series[0].points


def test_command_prints_saves_reads_and_draws(card, capsys, tmp_path):
    assert main(["bench", "curve", "--json", "--kernels", "read", "fp8"]) == 0
    path = tmp_path / "card.json"
    path.write_text(capsys.readouterr().out)
    assert {one.kernel for one in read_curve(path).series} == {"read", "fp8"}
    drawings = [tmp_path / name for name in ("one.svg", "two.svg")]
    pytest.importorskip("matplotlib")
    for drawing in drawings:
        assert main(["bench", "curve", "--read", str(path), "--svg", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "memory 1107 MHz (1134 GB/s on paper)" in out and "a graph's node costs 1.00 us" in out
    assert "fp8 linear, K 1024, T 1 (sm_70)" in out and "the number of blocks" in out
    first, second = (drawing.read_text() for drawing in drawings)
    assert first == second and "<svg" in first


def test_command_refuses_a_busy_host_and_bad_numbers(card, capsys, tmp_path):
    assert main(["bench", "curve", "--steps", "0"]) == 2
    assert main(["bench", "curve", "--pool-mb", "0"]) == 2
    assert main(["bench", "curve", "--read", str(tmp_path / "no")]) == 2
    assert main(["bench", "curve", "--arch", "sm_90"]) == 3
    assert "this card runs sm_70" in capsys.readouterr().err
    card.dry = True
    assert main(["bench", "curve"]) == 3
    assert "queue ran dry" in capsys.readouterr().err


def test_a_curve_without_any_number_is_a_failed_check(card, capsys, monkeypatch):
    monkeypatch.setattr(curve_measure, "read_machine", lambda device: MACHINE)
    assert main(["bench", "curve", "--kernels", "read"]) == 1
    assert "no number: pool too small" in capsys.readouterr().out


def test_the_series_of_a_bench_serialises_with_its_refusals(card):
    bench = Bench(torch.device("cpu"), MACHINE, NODE, torch.zeros(1 << 22, dtype=torch.uint8), 3)
    series = bench.series("read", 0, 0, [1 << 19, 1 << 22])
    facts = json.loads(msgspec.json.encode(series))
    assert [one["nbytes"] for one in facts["refused"]] == [1 << 19, 1 << 22] and not facts["points"]
