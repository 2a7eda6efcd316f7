"""`duovolt bench serve --overhead` measures whole answers of a real server; its figures are told, not judged."""

import json
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import CheckFailed
from duovolt.cli.main import main
from duovolt.perf import overhead


def test_a_short_run_measures_everything(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "serve", "--overhead", "--ranks", "1", "--tokens", "40", "--rounds", "1", "--requests", "10"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alone, together = found["streams"]
    assert (alone["clients"], len(alone["rates"]), together["clients"], len(together["rates"])) == (1, 1, 4, 4)
    for stream in (alone, together):
        assert 0 < stream["share"] < 1.3  # 500 a second is what the ranks give; a short answer's ends weigh in
        assert stream["detokenise_us"] > 0 and stream["http_us"] > 0 and stream["engine_us"] > 0
        assert stream["first_byte_ms"] <= stream["worst_first_byte_ms"]
    assert found["memory"]["requests"] == 10 and found["memory"]["last_mb"] > 10


def test_an_answer_that_is_not_whole_is_no_figure() -> None:
    reading = overhead._Reading(None, 0, chunks=[b'data: {"usage": {"completion_tokens": 3}}\n\n'])  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match="an answer of 4 tokens came back"):
        overhead._check_whole(reading, 4)


@pytest.mark.parametrize("words", [["--rate", "0"], ["--tokens", "1"], ["--rounds", "0"], ["--requests", "-1"]])
def test_odd_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--overhead", *words]) == 2
    assert capsys.readouterr().err.startswith("duovolt: --rate is")


def test_memory_and_time_of_this_process_are_plausible() -> None:
    pid = int(Path("/proc/self").readlink().name)
    assert 1e6 < overhead._resident_bytes(pid) < 1e12
    before = overhead._cpu_seconds(pid)
    sum(range(2_000_000))
    assert 0.001 < overhead._cpu_seconds(pid) - before < 60
