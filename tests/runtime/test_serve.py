"""Whole servers: real processes, sockets, signals and kills, over scripted answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from duovolt.runtime.parallel.owner import start_time
from duovolt.runtime.parallel.shared import SHARED_DIR

from .conftest import Server, leftovers, wait_gone
from .stub_model import blocks, ids, make_ranks, write_script

USER: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
SLOW = {"blocks": [[token] for token in ids("</think>" + "x" * 3000)], "delay_ms": 20}
QUICK = {"blocks": blocks("Think.\n</think>\n\nHello world", 2)}

Start = Callable[..., Server]


def setup(folder: Path, *answers: dict[str, Any], size: int = 2) -> list[str | Path]:
    script = write_script(folder / "script.jsonl", *answers)
    return [make_ranks(folder / "ranks", size), "--backend", f"scripted:{script}"]


class Stream:
    """A chat stream being read by a thread."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._arguments = (server.url + CHAT, {"messages": USER, "stream": True} | body)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        url, body = self._arguments
        try:
            with httpx.stream("POST", url, json=body, timeout=30) as response:
                self.lines += [line for line in response.iter_lines() if line]
        except httpx.HTTPError as error:
            self.error = error

    def wait_lines(self, server: Server) -> None:
        """Until the answer has begun."""
        deadline = time.monotonic() + 20
        while server.metric("completion_tokens_total") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_official_client_streams_and_reads_whole(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*setup(tmp_path, QUICK))
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=30, max_retries=0)
    (model,) = client.models.list().data
    assert model.id == "ranks"
    whole = client.chat.completions.create(model=model.id, messages=USER)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.choices[0].message.reasoning_content == "Think."  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=model.id, messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    text = client.completions.create(model=model.id, prompt="once", max_tokens=3, logprobs=0)
    assert text.choices[0].text == "Thi"
    assert text.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=model.id, messages=USER, max_tokens=10**8)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "max_tokens"
    assert all(
        "duovolt rank" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in server.rank_pids()
    )
    assert len(server.rank_pids()) == 2
    assert leftovers(server.pid) == []  # while it serves, nothing has a name any more
    choices = server.wait_log("ready on .*")[0]
    for word in ("backend=scripted", "ranks=2", "conversion=none", "drafts=3", "lanes=1", "max_context=32768",
                 "collective=mailbox-cpu", "kv=none", "recipe=scripted"):  # fmt: skip
        assert word in choices


def test_one_rank_serves_from_its_own_folder(start_server: Start, tmp_path: Path) -> None:
    arguments = setup(tmp_path, QUICK, size=1)
    server = start_server(tmp_path / "ranks" / "rank-0-of-1", *arguments[1:])
    with server.client() as client:
        answer = client.post(CHAT, json={"messages": USER}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert "collective=solo" in server.log
    assert len(server.rank_pids()) == 1


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_the_lane_once(start_server: Start, tmp_path: Path, streaming: bool) -> None:
    """A01: the ranks stop within a step, streamed or not, and the next request is not slowed."""
    server = start_server(*setup(tmp_path, SLOW, QUICK))
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", server.url + CHAT, json={"messages": USER, "stream": streaming}, timeout=1.0) as response,
    ):
        for _ in response.iter_lines():
            if streaming and server.metric("completion_tokens_total") > 3:
                raise httpx.ReadTimeout("left")
    start = time.monotonic()
    with server.client() as client:
        answer = client.post(CHAT, json={"messages": USER}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello world"  # and nothing of the one before
    assert time.monotonic() - start < 5  # the script has a minute to go
    assert server.metric("cancelled_total") == 1
    assert server.metric("finished_total") == 1
    assert server.metric("running") == 0


def test_many_that_leave_are_each_cancelled_once(start_server: Start, tmp_path: Path) -> None:
    """A02 A03: as many aborts as clients that left, and nothing of the old answer in the next one."""
    server = start_server(*setup(tmp_path, SLOW, QUICK), "--lanes", "4")
    with server.client() as client:
        for _ in range(50):
            with client.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response:
                next(response.iter_lines())
            answer = client.post(CHAT, json={"messages": USER}).json()
            assert answer["choices"][0]["message"] == {
                "role": "assistant",
                "content": "Hello world",
                "reasoning_content": "Think.",
            }
    assert server.metric("cancelled_total") == 50
    assert server.metric("finished_total") == 50
    assert server.metric("running") == 0


def test_a_client_that_leaves_before_the_first_token_is_noticed(start_server: Start, tmp_path: Path) -> None:
    """A01: while the prompt is read."""
    server = start_server(*setup(tmp_path, {"blocks": [ids("x")] * 3, "delay_ms": 3000}))
    for number, streaming in enumerate((True, False), 1):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json={"messages": USER, "stream": streaming}, timeout=0.5)
        deadline = time.monotonic() + 1.5
        while server.metric("cancelled_total") < number:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_lanes_fill_wait_and_refuse(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*setup(tmp_path, SLOW), "--lanes", "2", "--max-waiting", "1")
    streams = [Stream(server, max_tokens=3000) for _ in range(3)]
    deadline = time.monotonic() + 15
    while server.metric("running") + server.metric("waiting") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with server.client() as client:
        full = client.post(CHAT, json={"messages": USER})
    assert full.status_code == 429
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["code"] == "queue_full"
    assert (server.metric("running"), server.metric("waiting")) == (2, 1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)  # two of a kind that are pending at once count as one
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(5) == 0
    assert len(streams) == 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_open_answers_with_an_error_and_comes_back(
    start_server: Start, tmp_path: Path, victim: int
) -> None:
    """A14: an error event, no [DONE], and the stream closes."""
    server = start_server(*setup(tmp_path, SLOW, QUICK))
    stream = Stream(server)
    stream.wait_lines(server)
    old = server.rank_pids()
    os.kill(old[victim], signal.SIGKILL)
    stream.thread.join(5)
    assert stream.error is None
    assert '"error"' in stream.lines[-1] and "was killed by signal 9" in stream.lines[-1]
    assert "data: [DONE]" not in stream.lines
    wait_gone(old, 5)
    with server.client() as client:
        down = client.post(CHAT, json={"messages": USER, "max_tokens": 9})
        if down.status_code != 200:
            assert down.status_code == 503
            assert int(down.headers["retry-after"]) >= 1
            assert down.json()["error"]["type"] == "server_error"
        assert client.get("/health/live").status_code == 200
        server.wait_log("ready on", count=2)
        assert client.get("/health/ready").status_code == 200
        assert client.post(CHAT, json={"messages": USER, "max_tokens": 9}).status_code == 200
    assert server.metric("restarts_total") == 1
    assert len(server.rank_pids()) == 2
    assert leftovers(server.pid) == []


def test_a_killed_proxy_leaves_no_rank_and_the_next_start_no_file(start_server: Start, tmp_path: Path) -> None:
    """R08 R09: ranks go with their proxy, and names of the dead with the next start."""
    arguments = setup(tmp_path, SLOW)
    server = start_server(*arguments)
    Stream(server).wait_lines(server)
    ranks = server.rank_pids()
    server.process.kill()
    assert wait_gone(ranks, 10) < 10
    early = start_server(*arguments, ready=False)  # killed while it still has names
    deadline = time.monotonic() + 20
    while not leftovers(early.pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    early.process.kill()
    early.process.wait()
    start_server(*arguments)
    assert leftovers(server.pid) == []
    assert leftovers(early.pid) == []


def test_a_live_servers_memory_is_left_alone(start_server: Start, tmp_path: Path) -> None:
    """R08: the sweep takes those of dead owners only."""
    mine = SHARED_DIR / f"duovolt-{os.getpid()}-{start_time(os.getpid())}-0000abcd"
    mine.write_bytes(b"x")
    try:
        first = start_server(*setup(tmp_path, QUICK))
        second = start_server(*setup(tmp_path, QUICK))
        for server in (first, second):
            with server.client() as client:
                assert client.post(CHAT, json={"messages": USER}).status_code == 200
        assert mine.exists()
    finally:
        mine.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_server_is_gone_within_two_seconds(start_server: Start, tmp_path: Path, number: signal.Signals) -> None:
    server = start_server(*setup(tmp_path, QUICK))
    client = server.client()
    client.get("/health/live")  # a connection kept open must not hold the end up
    ranks = server.rank_pids()
    assert server.seconds_to_end(number) < 2
    wait_gone(ranks, 1)
    assert leftovers(server.pid) == []
    assert "Traceback" not in server.log
    client.close()


def test_a_terminal_that_closes_breaks_no_answer_off_without_a_word(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*setup(tmp_path, SLOW), "--drain-seconds", "20")
    stream = Stream(server, max_tokens=60)
    stream.wait_lines(server)
    server.process.send_signal(signal.SIGHUP)
    assert server.wait_exit(15) == 0
    stream.thread.join(5)
    assert stream.lines[-1] == "data: [DONE]" and leftovers(server.pid) == []


def test_a_server_that_its_owner_keeps_from_hangups_goes_on(tmp_path: Path) -> None:
    server = Server([str(word) for word in setup(tmp_path, QUICK)], {}, before=["nohup"])
    try:
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        with server.client() as client:
            assert client.post(CHAT, json={"messages": USER}).status_code == 200
        assert server.seconds_to_end(signal.SIGTERM) < 2
    finally:
        server.kill()


def test_a_server_that_still_loads_ends_as_fast(start_server: Start, tmp_path: Path) -> None:
    """Ranks that would never be ready: nothing of the start is waited for."""
    server = start_server(*setup(tmp_path, QUICK), ready=False, DUOVOLT_START_FAULT="0:1:never")
    deadline = time.monotonic() + 20
    while len(server.rank_pids()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    ranks = server.rank_pids()
    assert server.seconds_to_end(signal.SIGTERM) < 2
    wait_gone(ranks, 1)
    assert leftovers(server.pid) == []


def test_a_busy_server_lets_a_running_answer_finish_and_takes_no_other(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*setup(tmp_path, SLOW), "--drain-seconds", "20")
    stream = Stream(server, max_tokens=60)
    stream.wait_lines(server)
    kept = server.client()
    kept.get("/health/live")
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert kept.post(CHAT, json={"messages": USER}).status_code == 503
    with pytest.raises(httpx.ConnectError), server.client() as client:
        client.get("/health/live")
    assert server.wait_exit(15) == 0
    stream.thread.join(5)
    assert stream.lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in stream.lines[-2]
    kept.close()


def test_a_drain_that_takes_too_long_is_broken_off_and_so_by_a_second_signal(
    start_server: Start, tmp_path: Path
) -> None:
    arguments = setup(tmp_path, SLOW)
    for options, signals in ((["--drain-seconds", "0.5"], 1), (["--drain-seconds", "60"], 2)):
        server = start_server(*arguments, *options)
        stream = Stream(server)
        stream.wait_lines(server)
        ranks = server.rank_pids()
        assert server.seconds_to_end(*[signal.SIGTERM] * signals) < 3
        wait_gone(ranks, 1)
        stream.thread.join(5)
        assert "the server stopped before the answer was whole" in stream.lines[-1]
        assert "Traceback" not in server.log


def test_a_drain_does_not_count_the_time_in_which_everything_was_frozen(start_server: Start, tmp_path: Path) -> None:
    """A paused container that is stopped: its answers have their seconds once it goes on."""
    server = start_server(*setup(tmp_path, SLOW), "--drain-seconds", "4")
    stream = Stream(server, max_tokens=60)
    stream.wait_lines(server)
    everything = [server.pid, *server.rank_pids()]
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("stopping: 1 answers have 4 s")
    for number, pause in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
        for pid in everything:
            os.kill(pid, number)
        time.sleep(pause)
    assert server.wait_exit(15) == 0
    stream.thread.join(5)
    assert stream.lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in stream.lines[-2]


@pytest.mark.parametrize("kind", ["hash", "count"])  # position: tests/runtime/faults
def test_a_rank_that_parts_stops_both_with_both_records(start_server: Start, tmp_path: Path, kind: str) -> None:
    server = start_server(*setup(tmp_path, SLOW, QUICK), DUOVOLT_LOCKSTEP_FAULT=f"1:3:{kind}")
    old = server.rank_pids()
    stream = Stream(server)
    stream.thread.join(10)
    assert '"error"' in stream.lines[-1] and "TP2 LOCKSTEP FAILURE" in stream.lines[-1]
    shown = [line for line in stream.lines if '"content":"x"' in line]
    assert len(shown) == 2  # rounds 0 to 2 gave </think> and two letters; round 3 was never seen
    wait_gone(old, 5)
    server.wait_log("ready on", count=2)
    with server.client() as client:
        assert client.post(CHAT, json={"messages": USER, "max_tokens": 9}).status_code == 200
    assert server.log.count("TP2 LOCKSTEP FAILURE at record") >= 1
    assert "rank 0: StepRecord(kind='round'" in server.log and "rank 1: StepRecord(kind='round'" in server.log


@pytest.mark.parametrize("kind", ["drop", "60000"])
def test_a_lost_mailbox_word_is_an_error_not_a_hang(start_server: Start, tmp_path: Path, kind: str) -> None:
    server = start_server(*setup(tmp_path, SLOW, QUICK), "--watchdog-seconds", "2", DUOVOLT_MAILBOX_FAULT=f"0:5:{kind}")
    stream = Stream(server)
    stream.thread.join(10)
    assert '"error"' in stream.lines[-1]
    assert "no answer from rank 0 at mailbox step 5 within 1 s" in server.log
    assert len([line for line in stream.lines if '"content":"x"' in line]) == 2  # steps 2 to 4 were whole
    server.wait_log("ready on", count=2)


def test_a_wrapping_step_counter_changes_no_answer(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*setup(tmp_path, QUICK), DUOVOLT_MAILBOX_FAULT="0:3:wrap")
    with server.client() as client:
        for _ in range(2):
            answer = client.post(CHAT, json={"messages": USER}).json()
            assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert server.metric("restarts_total") == 0


def test_a_stuck_rank_turns_ready_red_and_the_watchdog_ends_it(start_server: Start, tmp_path: Path) -> None:
    """O01: /health/ready tells the truth while decoding is stuck; /health/live stays green."""
    server = start_server(*setup(tmp_path, SLOW, size=1), "--watchdog-seconds", "3")
    stream = Stream(server)
    stream.wait_lines(server)
    (rank,) = server.rank_pids()
    os.kill(rank, signal.SIGSTOP)
    start = time.monotonic()
    with server.client() as client:
        while client.get("/health/ready").status_code == 200:
            assert time.monotonic() - start < 3
            time.sleep(0.05)
        assert client.get("/health/live").status_code == 200
    stream.thread.join(10)
    assert "the ranks are taken to hang" in stream.lines[-1]
    wait_gone([rank], 3)
    server.wait_log("ready on", count=2)


REFUSALS: dict[str, tuple[list[str], int, str]] = {
    "no such folder": (["{folder}/none", "--backend", "{script}"], 2, "no such directory"),
    "unknown backend": (["{folder}/ranks", "--backend", "fast"], 2, "expected one of"),
    "bad script": (["{folder}/ranks", "--backend", "scripted:{folder}/bad.jsonl"], 2, "line 2"),
    "unfinished": (["{folder}/ranks"], 2, "unfinished"),
    "a converted directory": (["{folder}/converted"], 2, "duovolt shard {folder}/converted RANKS"),
    "a checkpoint": (["{folder}/source"], 2, "duovolt convert {folder}/source CONVERTED"),
    "the folder above": (["{folder}/above"], 2, "but {folder}/above/ranks does: serve that"),
    "one of two": (["{folder}/ranks/rank-0-of-2", "--backend", "{script}"], 2, "one rank of 2"),
    "missing rank": (["{folder}/half", "--backend", "{script}"], 2, "rank-1-of-2 is missing"),
    "two splits": (["{folder}/both", "--backend", "{script}"], 2, "ranks of several splits"),
    "three ranks": (["{folder}/three", "--backend", "{script}"], 2, "serves 1 or 2"),
    "other tokenizer": (["{folder}/mixed", "--backend", "{script}"], 2, "tokenizer digest"),
    "no host": (
        ["{folder}/ranks", "--backend", "{script}", "--host", "203.0.113.7"],
        3,
        "cannot listen on 203.0.113.7",
    ),
    "key file": (["{folder}/ranks", "--backend", "{script}", "--api-key-file", "{folder}/none"], 2, "--api-key-file"),
    "drafts of a script": (["{folder}/ranks", "--backend", "{script}", "--drafts", "2"], 2, "by a model, not a script"),
    "lanes": (["{folder}/ranks", "--backend", "{script}", "--lanes", "9"], 2, "1 to 4"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_work_is_refused_with_one_line_before_anything_starts(
    start_server: Start, tmp_path: Path, case: str
) -> None:
    arguments, code, words = REFUSALS[case]
    script = write_script(tmp_path / "script.jsonl", QUICK)
    (tmp_path / "bad.jsonl").write_text('{"blocks": [[1]]}\n{"blocks": 3}\n')
    make_ranks(tmp_path / "ranks", 2)
    (make_ranks(tmp_path / "half", 2) / "rank-1-of-2").rename(tmp_path / "elsewhere")
    make_ranks(make_ranks(tmp_path / "both", 2), 1)
    make_ranks(tmp_path / "three", 3)
    with (make_ranks(tmp_path / "mixed", 2) / "rank-1-of-2" / "tokenizer.json").open("a") as file:
        file.write(" ")
    make_ranks(tmp_path / "above" / "ranks", 2)
    for stage, file in (("converted", "duovolt.json"), ("source", "config.json")):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / file).write_text("{}")
    places = {"folder": str(tmp_path), "script": f"scripted:{script}"}
    server = start_server(*(argument.format(**places) for argument in arguments), ready=False)
    assert server.wait_exit(20) == code
    assert words.format(**places) in server.log
    assert len([line for line in server.lines if line.startswith("duovolt")]) == 1
    assert "Traceback" not in server.log
    assert leftovers(server.pid) == []


def test_a_port_in_use_is_an_environment_fault(start_server: Start, tmp_path: Path) -> None:
    arguments = setup(tmp_path, QUICK)
    server = start_server(*arguments)
    other = start_server(*arguments, "--port", server.url.rpartition(":")[2], ready=False)
    assert other.wait_exit(20) == 3
    assert "choose another --port" in other.log
