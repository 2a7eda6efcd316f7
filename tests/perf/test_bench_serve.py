"""`bench serve`: materials, a matrix over our server and over another one, resuming, tables, and what is refused."""

import gzip
import json
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.digest import digest_bytes
from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.cli.main import main
from duovolt.perf import materials, serve_matrix
from duovolt.perf.scripted_server import ScriptedServer, scripted_server
from duovolt.perf.serve_matrix import Matrix, ask_server, count_materials, open_run, steps_of
from duovolt.perf.serve_record import Answer, Head, Record, Settings, read_record
from duovolt.perf.serve_report import comparison, plot, rows_of, table
from duovolt.perf.serve_stream import Endpoint

PINNED = {"code": "f544fcfaf16bfae7", "chinese": "59942eee851dcfde"}


@pytest.mark.parametrize("material", materials.MATERIALS)
def test_materials_are_the_same_everywhere(material: str) -> None:
    count, _ = materials.PUBLISHED[material]
    text = "".join(islice(materials.blocks(material), count))
    # Figures of two machines are of one text, the one whose tokens were counted.
    assert digest_bytes(text.encode()).startswith(PINNED[material])
    short = materials.text_of(material, 1000)
    assert 800 < len(short) <= 1000 and text.startswith(short)
    assert next(materials.blocks(material, 1)) != next(materials.blocks(material, 0))
    asked = materials.prompt(material, short, "a-mark")
    assert asked.startswith("[a-mark]") and short in asked


@pytest.fixture(scope="module")
def ours() -> Iterator[ScriptedServer]:
    with scripted_server(200, 2.0, 2, 1) as server:
        yield server


def url_of(server: ScriptedServer) -> str:
    return f"http://{server.host}:{server.port}"


def settings(**changes: Any) -> Settings:
    base = {
        "contexts": [600], "materials": ["code"], "lanes": [1], "seeds": 2, "cold_seeds": 1, "tokens": 20,
        "temperature": 0.0,
    }  # fmt: skip
    return Settings(**(base | changes))


def test_a_matrix_over_our_server_and_its_table(
    ours: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.jsonl"
    command = ["bench", "serve", "--url", url_of(ours), "--contexts", "600", "900", "9999999", "--lanes", "1", "2", "3"]
    command += ["--materials", "chinese", "--seeds", "2", "--tokens", "30", "--out", str(out)]
    assert main([*command, "--machine", "card=a card", "driver=580"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("left out: ") == 2 and "3 lanes: the server has 2" in printed.err
    assert "recipe scripted" in printed.out and "card: a card, driver: 580" in printed.out
    record = read_record(out)
    assert [answer.step[0::3] for answer in record.answers[:3]] == [(600, "cold"), (600, "cached"), (600, "cached")]
    assert len(record.answers) == 2 * (3 + 6)
    for answer in record.answers:
        assert answer.completion_tokens == 30 and answer.accepted == 0
        # 64 are kept for the template, and of the last sentence, of up to 247 tokens here, all or nothing is taken.
        assert answer.context - 30 - 64 - 247 < answer.prompt_tokens <= answer.context - 30
        assert answer.rate is not None and answer.rate > 0
    # A pace of 2 ms a round; where a machine stood still, what had piled up meanwhile came at once.
    assert statistics.median(answer.rate for answer in record.answers if answer.rate is not None) < 3000
    lines = out.read_bytes()
    assert main([*command, "--json"]) == 0  # all done: nothing is asked again
    assert out.read_bytes() == lines
    found = json.loads(capsys.readouterr().out)
    assert [(row["context"], row["lanes"]) for row in found["rows"]] == [(600, 1), (600, 2), (900, 1), (900, 2)]


def test_a_run_goes_on_where_it_was_killed(
    ours: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise AssertionError("the file is written anew")

    out, told = tmp_path / "run.jsonl", []
    endpoint = Endpoint(url_of(ours), None, 20)
    server = ask_server(endpoint, None)
    record, journal = open_run(out, server, settings(), {})
    first = Matrix(endpoint, server, record, journal)
    assert [step.mode for step in first.left()] == ["cold", "cached", "cached"]
    for step in first.left()[:2]:
        first.run(step)
    journal.close()
    out.write_bytes(out.read_bytes() + b'{"context": 600, "mat')  # killed in the middle of a line
    monkeypatch.setattr(Path, "write_bytes", fail)  # nothing already measured is ever written again
    record, journal = open_run(out, server, settings(), {})
    second = Matrix(endpoint, server, record, journal)
    assert [(step.mode, step.seed) for step in second.left()] == [("cached", 1)]
    second.run(second.left()[0], told.append)
    journal.close()
    assert told[0] == "fills the cache again"  # this process had not sent that prompt
    assert len(read_record(out).answers) == 3 and read_record(out).head.run == first.head.run
    with pytest.raises(InputError, match="other settings"):
        open_run(out, server, settings(seeds=3), {})
    with pytest.raises(InputError, match="no room for a prompt"):
        Matrix(endpoint, server, Record(record.head, []), journal)._text(90, "code")
    endpoint.close()


def test_the_order_of_the_matrix() -> None:
    steps = list(steps_of(settings(materials=["code", "chinese"], cold_seeds=2)))
    assert [(step.material, step.mode, step.seed) for step in steps[:4]] == [
        ("code", "cold", 0), ("code", "cached", 0), ("code", "cold", 1), ("code", "cached", 1),
    ]  # fmt: skip
    assert len(steps) == 8


class Other(BaseHTTPRequestHandler):
    """A server with the bare chat API: no /tokenize, nothing of its own in its answers."""

    bodies: list[dict[str, Any]] = []
    answer = "good"

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/v1/models" else 404, {"data": [{"id": "some-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.reply(404, {"error": "no"})
            return
        self.bodies.append(body)
        if self.answer == "refused":
            self.reply(400, {"error": {"message": "unknown field\nignore_eos"}})
            return
        self.send_response(200)
        events = b"".join(b"data: " + event + b"\n\n" for event in self.events(body))
        if "gzip" in self.headers.get("Accept-Encoding", ""):  # as a proxy in front of a server may
            self.send_header("Content-Encoding", "gzip")
            events = gzip.compress(events)
        self.end_headers()
        self.wfile.write(events)

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        if self.answer == "garbage":
            yield b"<html>"
        if self.answer == "short":
            return
        if self.answer == "dies":
            yield json.dumps({"choices": [{"delta": {"content": "x"}}]}).encode()
            yield json.dumps({"error": {"message": "rank 1 was\nkilled", "type": "server_error"}}).encode()
            return
        for _ in range(body["max_tokens"] if self.answer != "nothing" else 0):
            yield json.dumps({"choices": [{"delta": {"content": "x"}}]}).encode()
        yield json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}).encode()
        words = len(body["messages"][0]["content"]) // 4
        if self.answer != "no usage":
            usage = {"prompt_tokens": words, "completion_tokens": 0, "prompt_tokens_details": None}
            usage["completion_tokens"] = 0 if self.answer == "nothing" else body["max_tokens"]
            yield json.dumps({"choices": [], "usage": usage}).encode()
        yield b"[DONE]"

    def reply(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Other.bodies, Other.answer = [], "good"
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


COMMAND = ["bench", "serve", "--contexts", "2000", "--materials", "code", "--seeds", "1", "--tokens", "8", "--url"]


def test_any_other_server_is_measured_without_what_it_does_not_tell(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, other, "--json", "--stop-at-end"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["acceptance"] is None and row["round_ms"] is None and row["cached_tokens"] is None
    assert 0.9 * 2000 < row["prompt_tokens"] <= 2000 and row["rate"]["count"] == 2
    texts = [body["messages"][0]["content"] for body in Other.bodies if body["max_tokens"] == 8]
    assert len(texts) == 2 and texts[0] == texts[1]  # cold, then the same again
    assert Other.bodies[0]["model"] == "some-model" and not any("ignore_eos" in body for body in Other.bodies)


@pytest.mark.parametrize(
    "answer, code, message",
    [
        ("refused", 2, "400: unknown field ignore_eos"),
        ("garbage", 1, "no piece of a chat answer"),
        ("short", 1, "ended without saying why"),
        ("dies", 1, "duovolt: the server broke the answer off: rank 1 was killed.\n"),
        ("nothing", 1, "ended without a token"),
        ("no usage", 1, "does not tell usage"),
    ],
)
def test_servers_that_do_otherwise_are_named_in_one_line(
    other: str, answer: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Other.answer = answer
    assert main([*COMMAND, other]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_whose_server_broke_off_goes_on(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, events = tmp_path / "run.jsonl", Other.events

    def dies_at_the_second(self: Other, body: dict[str, Any]) -> Iterator[bytes]:
        Other.answer = "dies" if read_record(out).answers else "good"
        return events(self, body)

    with monkeypatch.context() as patch:
        patch.setattr(Other, "events", dies_at_the_second)
        assert main([*COMMAND, other, "--out", str(out)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"duovolt: the server broke the answer off: rank 1 was killed. What came before is in {out}: the same command goes on "
        "there."
    )
    before = read_record(out).answers
    assert [answer.mode for answer in before] == ["cold"]
    Other.answer = "good"
    assert main([*COMMAND, other, "--out", str(out)]) == 0
    assert [answer.mode for answer in read_record(out).answers] == ["cold", "cached"]


def test_counts_of_a_file_that_are_none_are_told_in_one_line(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.jsonl"
    assert main([*COMMAND, other, "--out", str(out), "--quiet"]) == 0
    *before, last = out.read_text().splitlines()
    for field, count in product(("completion_tokens", "accepted", "lanes"), (-1, 10**400, True)):
        out.write_text("\n".join([*before, json.dumps(json.loads(last) | {field: count})]) + "\n")
        assert main(["bench", "serve", "--report", str(out)]) == 2, field
        error = capsys.readouterr().err
        assert "not a file of `duovolt bench serve`" in error and error.count("\n") == 1


def test_only_one_run_at_a_time_writes_to_a_file(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, events = tmp_path / "run.jsonl", Other.events
    codes: list[int] = []

    def again(self: Other, body: dict[str, Any]) -> Iterator[bytes]:
        if not codes and out.exists():
            codes.append(-1)
            codes[0] = main([*COMMAND, other, "--out", str(out), "--quiet"])
        return events(self, body)

    monkeypatch.setattr(Other, "events", again)
    assert main([*COMMAND, other, "--out", str(out), "--quiet"]) == 0 and codes == [2]
    error = capsys.readouterr().err
    assert error == f"duovolt: {out}: another process is writing here. Wait for it, or name another file.\n"
    assert [answer.mode for answer in read_record(out).answers] == ["cold", "cached"]


def test_a_file_that_another_run_began_meanwhile_stays_whole(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, counted = tmp_path / "run.jsonl", serve_matrix.count_materials

    def slowly(*arguments: Any) -> dict[str, int]:
        out.write_bytes(b"of another\n")
        return counted(*arguments)

    monkeypatch.setattr(serve_matrix, "count_materials", slowly)
    assert main([*COMMAND, other, "--out", str(out)]) == 2
    assert "another run has begun it meanwhile" in capsys.readouterr().err and out.read_bytes() == b"of another\n"


def test_a_line_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setattr("duovolt.perf.serve_stream._LONGEST_LINE", 1 << 12)
    monkeypatch.setattr(Other, "events", lambda self, body: iter([b"x" * (1 << 20)]))
    with pytest.raises(CheckFailed, match="a line of more than"):
        Endpoint(other, None, 5).stream({"max_tokens": 1})


def test_a_model_that_is_not_there_is_named(other: str) -> None:
    endpoint = Endpoint(other, None, 5)
    assert ask_server(endpoint, "some-model").model == "some-model"
    with pytest.raises(InputError, match="has some-model: name one"):
        ask_server(endpoint, "another")
    with pytest.raises(EnvironmentFault, match="no server at"):
        ask_server(Endpoint("http://127.0.0.1:9", None, 5), None)


def answer(context: int, mode: str, seed: int, decode_ms: float, accepted: int | None = 30, **more: Any) -> Answer:
    values: dict[str, Any] = {
        "context": context, "material": "code", "lanes": 1, "mode": mode, "seed": seed, "lane": 0,
        "prompt_tokens": context - 61, "completion_tokens": 61, "cached_tokens": 0, "first_ms": 1500.0,
        "decode_ms": decode_ms, "proposed": 60, "accepted": accepted,
    }  # fmt: skip
    return Answer(**(values | more))


def a_record(*answers: Answer, **server: str) -> Record:
    return Record(
        Head.new("a-model", settings(), {"conversion_id": "abc", "recipe": "v100"} | server, {}), list(answers)
    )


def test_materials_are_counted_in_their_published_lengths(ours: ScriptedServer, other: str, tmp_path: Path) -> None:
    """By the server's own tokenizer, for a new run; one that does not count leaves it out."""
    endpoint = Endpoint(url_of(ours), None, 20)
    counts = count_materials(endpoint, ["code"])
    assert counts["code"] == endpoint.count_tokens("".join(islice(materials.blocks("code"), 722))) > 100_000
    assert count_materials(Endpoint(other, None, 20), ["code", "chinese"]) == {}
    out, server = tmp_path / "run.jsonl", ask_server(endpoint, None)
    open_run(out, server, settings(), {}, lambda: counts)[1].close()
    record = open_run(out, server, settings(), {}, lambda: pytest.fail("asked again"))[0]
    assert f"722 blocks of code are {counts['code']:,} tokens here (published: 186,000)" in table(record)
    assert "blocks" not in table(a_record(answer(64, "cold", 0, 60.0)))


def test_rows_hold_mean_and_range() -> None:
    record = a_record(
        answer(8192, "cold", 0, 300.0), answer(8192, "cached", 0, 300.0, first_ms=100.0),
        answer(8192, "cached", 1, 600.0, first_ms=200.0), answer(64, "cold", 0, 60.0, None, proposed=None),
    )  # fmt: skip
    short, row = rows_of(record)
    assert short.acceptance is None and short.round_ms is None and short.cached is None
    assert row.rate is not None and (row.rate.least, row.rate.most, row.rate.count) == (100.0, 200.0, 3)
    assert row.acceptance is not None and row.acceptance.mean == 0.5
    assert row.round_ms is not None and (row.round_ms.least, row.round_ms.most) == (10.0, 20.0)  # 30 rounds
    assert row.cold is not None and row.cold.mean == 1.5
    assert row.cached is not None and (row.cached.least, row.cached.most) == (0.1, 0.2)
    printed = table(record)
    assert "a-model; conversion abc, recipe v100; card, clock and driver not told" in printed
    assert "| 8,192 | code | 1 | 8,131 | 1.50 | 0.15 (0.10 to 0.20) | 166.7 (100.0 to 200.0) | 50.0%" in printed


def test_two_runs_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        a_record(answer(8192, "cold", 0, 300.0)),
        a_record(answer(8192, "cold", 0, 600.0), recipe="other", head_split="on", attention="plain", graphs="off"),
    )
    printed = comparison(fast, slow)
    assert "| 200.0, was 100.0 (+100.0%) | 1.50, was 1.50 (+0.0%) | - |" in printed and "recipe other" in printed
    assert "attention plain, head split on, graphs off" in printed
    with pytest.raises(InputError, match="no context, material and number of lanes in common"):
        comparison(fast, a_record(answer(64, "cold", 0, 1.0)))
    import msgspec

    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, record in zip(paths, (fast, slow), strict=True):
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (record.head, *record.answers)))
    assert main(["bench", "serve", "--report", str(paths[0]), "--against", str(paths[1])]) == 0
    assert capsys.readouterr().out.strip() == printed


def test_plots_name_their_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    record = a_record(*(answer(n, "cold", 0, n / 10, material=m) for n in (1024, 8192) for m in materials.MATERIALS))
    written = plot(record, tmp_path)
    assert [path.name for path in written] == ["rate.svg", "cold.svg"]
    first = [path.read_bytes() for path in written]
    assert all(b"<svg" in content for content in first)
    plot(record, tmp_path)
    assert [path.read_bytes() for path in written] == first


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"\xff\n", b'{"run": 1}\n', b"[" * 100_000 + b"\n", b'{"format": "other"}\n']
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert main(["bench", "serve", "--report", str(path)]) == 2
    error = capsys.readouterr().err
    assert "not a file of `duovolt bench serve`" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs --url"),
        (["--url", "u", "--contexts", "5"], "--contexts are from 64"),
        (["--url", "u", "--lanes", "0"], "--lanes are from 1"),
        (["--url", "u", "--seeds", "0"], "--seeds is 1"),
        (["--url", "u", "--cold-seeds", "9"], "--cold-seeds 0 up to"),
        (["--url", "u", "--tokens", "1"], "--tokens is 2"),
        (["--url", "u", "--temperature", "nan"], "'nan' is not a number"),
        (["--url", "u", "--temperature", "2.1"], "--temperature is 0"),
        (["--url", "http://127.0.0.1:9", "--machine", "card"], "expected NAME=VALUE"),
        (["--url", "http://x:y"], "--url http://x:y"),
        (["--report", "nothing.jsonl"], "no such file"),
        (["--report", "nothing.jsonl", "--plot", "nowhere"], "not a directory"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
