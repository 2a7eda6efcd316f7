"""The record of a bandwidth curve: what it says between its points, and what it refuses to read."""

import msgspec
import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.perf.curve import Curve, Point, Refused, Series, read_curve
from duovolt.perf.machine import Machine

MACHINE = Machine(
    card="Tesla V100-PG500-216", capability=(7, 0), multiprocessors=72, core_mhz=1380, memory_mhz=1107, bus_bits=4096,
    l2_bytes=6 << 20, memory_bytes=32 << 30, driver="580.65.06", torch="2.7.1", cuda="12.6", duovolt="0.1.0",
    date="2026-01-02",
)  # fmt: skip
NODE = 1e-6
CONSTANT, RATE = 3e-6, 900e9  # the law that the made-up card follows


def point(nbytes: int) -> Point:
    seconds = CONSTANT + nbytes / RATE
    return Point(nbytes, nbytes / seconds / 1e9, nbytes / (seconds - NODE) / 1e9, 0.01)


def curve(*series: Series) -> Curve:
    return Curve(MACHINE, 1e6 * NODE, 0.02, 1 << 30, 15, list(series))


SERIES = Series("read", "sm_70", [point(n << 20) for n in (1, 2, 8, 64, 512)])


@pytest.mark.parametrize("nbytes", [1 << 19, 1 << 20, 3 << 20, 8 << 20, 100 << 20, 512 << 20])
def test_time_follows_the_law_between_and_below_the_points(nbytes):
    assert SERIES.seconds(nbytes, NODE) == pytest.approx(CONSTANT + nbytes / RATE, rel=1e-9)


def test_time_above_the_last_point_has_its_bandwidth_and_never_falls_below_a_node():
    last = SERIES.points[-1]
    assert SERIES.seconds(4 * last.nbytes) == pytest.approx(4 * last.seconds)
    assert SERIES.seconds(0, NODE) == NODE
    steep = Series("read", "sm_70", [Point(10**6, 100, 100, 0), Point(2 * 10**6, 50, 50, 0)])  # time grows by 3 a size
    assert steep.seconds(1000, NODE) == NODE
    with pytest.raises(InputError, match="no point"):
        Series("read", "sm_70", []).seconds(1)


def test_find_takes_all_sizes_before_the_token_counts_of_a_few():
    few = Series("fp8", "sm_70", [point(1 << 20)], 5120, 4)
    full = Series("fp8", "sm_70", SERIES.points, 5120, 1)
    refused = Series("half", "sm_70", [], 5120, 1, [Refused(1, "queue ran dry")])
    found = curve(few, full, refused)
    assert found.find("fp8", 4) is full
    with pytest.raises(InputError, match="no series of 'half', only of fp8, half"):
        found.find("half")


def test_the_peak_tells_the_two_memory_clocks_apart():
    assert round(MACHINE.peak_gbps) == 1134
    assert round(msgspec.structs.replace(MACHINE, memory_mhz=877).peak_gbps) == 898


def test_a_file_gives_the_curve_back(tmp_path):
    path = tmp_path / "curve.json"
    path.write_bytes(curve(SERIES).encode())
    assert read_curve(path) == curve(SERIES)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"duovolt-curve-1", b"duovolt-curve-9", "format is 'duovolt-curve-9'"),
        (b'"nbytes": 1048576', b'"nbytes": 9999999999', "must rise"),
        (b'"nbytes": 1048576', b'"nbytes": -5', "nbytes > 0"),
        (b'"spread": 0.01', b'"spread": 1e999', "spread"),
        (b'"node_us": 1.0', b'"node_us": -1', "node_us"),
        (b'"repeats"', b'"repeat"', "unknown field"),
        (b"{", b"[" * 100000, "not a curve"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, old, new, why):
    content = curve(SERIES).encode()
    assert old in content
    path = tmp_path / "curve.json"
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(InputError, match=why) as refused:
        read_curve(path)
    assert "\n" not in str(refused.value)


def test_a_large_file_is_not_read_whole(tmp_path):
    path = tmp_path / "curve.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="larger than"):
        read_curve(path)
