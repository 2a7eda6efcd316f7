"""bench collective: what its children say becomes a table, and what they do not say is told. No GPU."""

import json

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.cli.main import main
from duovolt.perf import collective, collective_alone
from duovolt.runtime.parallel.twins import Heard


def said(way: str, message: str, microseconds: float) -> dict:
    return {"way": way, "message": message, "microseconds": microseconds}


def test_the_slower_rank_counts_and_nccl_stands_beside() -> None:
    first = [{"facts": {"card": "V100"}}, said("ipc", "sum 40 KB", 4.0), said("nccl", "sum 40 KB", 20.0)]
    second = [said("ipc", "sum 40 KB", 5.0), said("nccl", "sum 40 KB", 19.0), said("all-reduce", "sum 40 KB", 15.0)]
    asked = []

    def run(arguments, seconds):
        asked.append(list(arguments))
        return [Heard(first, 0, ""), Heard(second, 0, "")]

    report = collective.measure(["ipc", "nccl"], run)
    assert asked == [["ipc", "nccl"]]
    assert report.rows == [collective.Row("sum 40 KB", {"ipc": 5.0, "nccl": 20.0, "all-reduce": 15.0})]
    assert report.facts == {"card": "V100"} and report.missing == {}
    text = "\n".join(collective.table(report))
    assert "card V100" in text and "3.0x" in text  # 15 us of NCCL's own all-reduce over 5 us


def test_what_could_not_be_measured_is_told() -> None:
    lines = [said("host", "sum 10 KB", 9.0), {"missing": "ipc", "why": "no peer access"}]
    report = collective.measure(
        ["ipc", "host"], lambda arguments, seconds: [Heard(lines, 0, ""), Heard([], None, "")], 7
    )
    text = "\n".join(collective.table(report))
    assert "ipc: no peer access" in text and "what rank 1 did not come to: not within 7 s" in text


def test_nothing_measured_is_an_error() -> None:
    dead = Heard([], 3, "rank 0: the driver\nsays no")
    with pytest.raises(EnvironmentFault, match=r"no way was measured: .* exit code 3: says no"):
        collective.measure(["ipc"], lambda arguments, seconds: [dead, dead])


def test_without_two_cards_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(collective.torch.cuda, "device_count", lambda: 1)
    assert main(["bench", "collective"]) == 3
    assert "two cards; this process sees 1" in capsys.readouterr().err


def test_the_lockstep_record_is_measured_without_a_card(monkeypatch, capsys) -> None:
    monkeypatch.setattr("duovolt.cli.bench_collective.LOCKSTEP_SKEWS_US", (0,))
    assert main(["bench", "collective", "--lockstep", "--json"]) == 0
    (cost,) = json.loads(capsys.readouterr().out)
    assert cost["skew_us"] == 0 and 0 < cost["own_us"] < 1e5


def test_alone_needs_a_card_and_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(collective.torch.cuda, "is_available", lambda: False)
    assert main(["bench", "collective", "--alone"]) == 3
    assert "no CUDA card is seen" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_both_sides_on_one_card(monkeypatch) -> None:
    monkeypatch.setattr(collective_alone, "REPLAYS", 2)
    report = collective_alone.measure()
    assert all(set(row.microseconds) == {"card", "host"} for row in report.rows)
    assert all(0 < figure < 1e5 for row in report.rows for figure in row.microseconds.values())
