"""`duovolt eval --url` and `--compare` against a server with known answers: figures, tables, and what is refused."""

import json
import math
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.perf.divergence import Predictor
from duovolt.perf.graded.items import Choice, read_items
from duovolt.perf.graded.report import table
from duovolt.perf.graded.result import Outcome, Result, pair, read_result, two_sided
from duovolt.perf.served_divergence import against_directory, coarse
from duovolt.perf.served_text import Window, windows_of

from .test_graders import SOLUTIONS

TINY = Path(__file__).parents[3] / "tiny" / "checkpoint"
WORDS = re.compile(r"\s*\S+|\s+")
ANSWERS = {item.question: item.answer for item in read_items(None) if isinstance(item, Choice)}


class Known(BaseHTTPRequestHandler):
    """Every word a token. Text: the k-th word of a prompt has -0.5 nats, its rival the rest of `Known.rival`."""

    mode = "good"
    wrong: set[str] = set()
    rival = 0.3
    most = 10_000  # characters of a prompt
    used = 7  # tokens of an answer
    lives = 10_000  # answers to questions that it gives until its ranks are gone
    bodies: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        models = {"data": [{"id": "known", "max_model_len": 4000}]}
        self.reply(200 if self.path == "/v1/models" else 404, models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.mode == "garbage":
            self.reply(200, ["<html>"])
        elif self.path == "/v1/completions":
            self.complete(body)
        elif self.lives == 0:
            message = "the answer was broken off: rank 1 was killed by signal 9."
            self.reply(503, {"error": {"message": message, "type": "server_error"}})
        else:
            Known.lives -= 1
            text = self.said(body["messages"][0]["content"])
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice], "usage": {"completion_tokens": self.used}})

    def complete(self, body: dict[str, Any]) -> None:
        if self.mode == "no echo" or len(body["prompt"]) > self.most:
            self.reply(400, {"error": {"message": "echo is not supported"}})
            return
        text = "" if self.mode == "silent echo" else body["prompt"]
        tokens = [*WORDS.findall(body["prompt"]), " more"]
        values = [None, *[-0.5] * (len(tokens) - 1)]
        if self.mode == "nan":
            values[1] = None
        tops = [None, *[{token: -0.5, "rival": math.log(self.rival)} for token in tokens[1:]]]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        usage = {"prompt_tokens": len(tokens) - 1, "completion_tokens": 1}
        self.reply(200, {"choices": [{"text": text + " more", "logprobs": logprobs}], "usage": usage})

    def said(self, prompt: str) -> str:
        for question, letter in ANSWERS.items():
            if prompt.startswith(question):
                return "Answer: Z" if question in self.wrong else f"So it is.\n\nAnswer: {letter}"
        if "green locker" in prompt:
            return re.search(r"locker is (\d+)", prompt)[1]  # type: ignore[index]
        return f"```python\n{SOLUTIONS}```"

    def reply(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Known.mode, Known.wrong, Known.most, Known.bodies, Known.lives = "good", set(), 10_000, [], 10_000
    server = ThreadingHTTPServer(("127.0.0.1", 0), Known)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_everything_of_a_server_that_knows_the_answers(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "now.json"
    command = ["eval", "--url", url, "--score-bytes", "3000", "--contexts", "1024", "9000"]
    assert main([*command, "--answer-tokens", "500", "--no-thinking", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "perplexity 1.649 over" in printed.out  # exp(0.5)
    assert re.search(r"^all +38 +38 +100%  7$", printed.out, re.M) and "wrong:" not in printed.out
    assert printed.err == "left out: needles in 9,000 tokens: the server's context is 4,000 with the answer\n"
    found = read_result(out)
    assert found.text is not None and 0.8 * 3000 < found.text.bytes < 3000
    assert found.text.nats == pytest.approx(0.5 * found.text.tokens)
    assert found.sandbox and {one.kind for one in found.graded} == {"choice", "code", "needle"}
    chats = [body for body in Known.bodies if "messages" in body]
    assert all(body["temperature"] == 0 and body["max_tokens"] == 500 for body in Known.bodies[-38:])
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in chats)


def test_answers_of_a_run_that_broke_off_are_kept(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, unfinished = tmp_path / "now.json", tmp_path / "now.json.unfinished"
    command = ["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(out)]
    Known.lives = 3
    assert main(command) == 1
    died = "duovolt: the server answered 503: the answer was broken off: rank 1 was killed by signal 9."
    assert capsys.readouterr().err == (f"{died} 3 answers are kept in {unfinished}: the same command goes on there.\n")
    assert main(command) == 1 and len(unfinished.read_bytes().splitlines()) == 4  # the server is not back yet
    assert capsys.readouterr().err.count(died) == 1
    with unfinished.open("ab") as file:
        file.write(b'{"id": "trai')  # killed in the middle of a line
    Known.lives, Known.bodies = 10_000, []
    assert main([*command, "--answer-tokens", "5"]) == 2
    assert "of another model or with other settings" in capsys.readouterr().err
    assert main(command) == 0 and not unfinished.exists()
    assert len(Known.bodies) == len(ANSWERS) - 3, "what was answered is not asked again"
    assert [one.passed for one in read_result(out).graded] == [True] * len(ANSWERS)
    unfinished.write_bytes(b"[" * 100_000 + b"\n")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no unfinished run of `duovolt eval --url`" in error and error.count("\n") == 1
    Known.lives = 0
    unfinished.unlink()
    assert main(command) == 1 and not unfinished.exists(), "nothing was answered"
    assert capsys.readouterr().err == f"{died}\n"


def test_only_one_run_at_a_time_goes_on_with_a_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, unfinished = tmp_path / "now.json", tmp_path / "now.json.unfinished"
    command = ["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(out), "--quiet"]
    said, codes = Known.said, []

    def again(self: Known, prompt: str) -> str:
        if not codes:
            codes.append(None)
            codes[0] = main(command)
        return said(self, prompt)

    monkeypatch.setattr(Known, "said", again)
    assert main(command) == 0 and codes == [2]
    error = capsys.readouterr().err
    assert error == f"duovolt: {unfinished}: another process is writing here. Wait for it, or name another file.\n"
    assert len(read_result(out).graded) == len(ANSWERS) and not unfinished.exists()


def test_a_file_that_is_not_of_an_unfinished_run_stays_as_it_is(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, unfinished = tmp_path / "now.json", tmp_path / "now.json.unfinished"
    head = b'{"model":"known","server":{},"settings":{}}\n'
    for content in (b"my notes", b"\n", b"{}\n", head + b"x\n", b"\xff\n"):
        unfinished.write_bytes(content)
        assert main(["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "no unfinished run of `duovolt eval --url`" in error and error.count("\n") == 1
        assert unfinished.read_bytes() == content and not out.exists()
    assert not [body for body in Known.bodies if "messages" in body]


def test_a_run_killed_as_it_wrote_the_head_begins_anew(url: str, tmp_path: Path) -> None:
    out, unfinished = tmp_path / "now.json", tmp_path / "now.json.unfinished"
    command = ["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(out), "--quiet"]
    Known.lives = 1
    assert main(command) == 1
    unfinished.write_bytes(unfinished.read_bytes()[:20])
    Known.lives = 10_000
    assert main(command) == 0 and len(read_result(out).graded) == len(ANSWERS)


def test_what_cannot_become_the_result_is_refused_before_anything_is_asked(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(tmp_path)]) == 2
    assert "not a regular file" in capsys.readouterr().err and not Known.bodies


def test_did_it_get_dumber(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    command = ["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out"]
    assert main([*command, str(before)]) == 0
    for wrong, code, words in ((5, 0, "worse, but no more than chance explains (p = 0.062)"),
                               (6, 1, "worse, by more than chance explains (p = 0.031)")):  # fmt: skip
        Known.wrong = set(list(ANSWERS)[:wrong])
        assert main([*command, str(after)]) == 0
        capsys.readouterr()
        assert main(["eval", "--compare", str(before), str(after)]) == code
        printed = capsys.readouterr().out
        assert words in printed and f"before only {wrong}, after only 0" in printed
    assert printed.count("lost: ") == 6 and "no letter" in printed
    assert main(["eval", "--compare", str(after), str(before), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gained"] == ["trains", "discount", "remainder", "order", "days", "dice"]


def test_the_sign_test_and_the_pairs() -> None:
    assert two_sided(0, 0) == 1.0 and two_sided(3, 3) == 1.0
    assert two_sided(1, 9) == pytest.approx(2 * 11 / 1024)  # C(10,0) + C(10,1)
    one = Outcome("a", "choice", "1", True, "", 0)
    assert "\x1b" not in table(
        Result("", "", "m", {}, {}, graded=[Outcome("\x1b[2J", "choice", "1", False, "\x1b", 0)])
    )
    told = {
        "conversion_id": "abc",
        "recipe": "v100",
        "lanes": "1",
        "card 0": "V100, memory at 877 MHz",
        "driver": "580",
    }
    assert table(Result("2026-01-02T03", "0.1", "m", told, {})) == (
        "m; conversion abc, recipe v100, card 0 V100, memory at 877 MHz, driver 580; 2026-01-02, duovolt 0.1"
    )
    assert table(Result("2026-01-02T03", "0.1", "m", {}, {})).startswith("m; nothing told of itself;")
    changed = Outcome("a", "choice", "2", False, "", 0)  # the same id, another question
    assert pair([one], [changed]).lost == [] and pair([one], [one]).both == 1


def test_windows_halve_until_the_server_takes_them(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Known.most = 200
    assert main(["eval", "--url", url, "--what", "text", "--score-bytes", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["text"]["windows"]) >= 5
    text = "A few words, ünd größere 中文字符 " * 30
    assert "".join(windows_of(text, 64)) == text and all(len(one.encode()) <= 64 for one in windows_of(text, 64))


@pytest.mark.parametrize(
    ("mode", "options", "code", "message"),
    [
        ("no echo", ["--what", "text"], 2, "gives no log-probabilities of a prompt"),
        ("silent echo", ["--what", "text"], 2, "gives no log-probabilities of a prompt"),
        ("garbage", ["--what", "text"], 1, "no completion"),
        ("garbage", ["--what", "graded", "--kinds", "choice"], 1, "no chat answer"),
        ("nan", ["--what", "text"], 1, "has no log-probability"),
        ("good", ["--top", "0", "--against", "x"], 2, "--top is 1 to 20"),
        ("good", ["--contexts", "9"], 2, "--contexts are from 512"),
        ("good", ["--what", "graded", "--kinds", "text"], 2, "no question of these --kinds"),
        ("good", ["--items", "/nowhere/x"], 2, "--items /nowhere/x: No such file"),
        ("good", ["--out", "/nowhere/x"], 2, "no such folder"),
        ("good", ["--what", "graded", "--against", "x"], 2, "--against has no effect here"),
        ("good", ["a-directory"], 2, "one of: directories, --url"),
        ("good", ["--against", "/nowhere", "--score-bytes", "100"], 2, "no tokenizer.json"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    url: str, mode: str, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Known.mode = mode
    assert main(["eval", "--url", url, *options]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_count_that_is_none_is_told_in_one_line(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a server, and of a file."""
    out, unfinished = tmp_path / "now.json", tmp_path / "now.json.unfinished"
    command = ["eval", "--url", url, "--what", "graded", "--kinds", "choice", "--out", str(out), "--quiet"]
    Known.lives = 1
    assert main(command) == 1
    capsys.readouterr()
    kept = unfinished.read_bytes()
    Known.lives = 10_000
    for count in (-1, 10**30, 10**400, True, 1.5):
        with monkeypatch.context() as patch:
            patch.setattr(Known, "used", count)
            assert main(command) == 1
        error = capsys.readouterr().err
        assert "no chat answer" in error and error.count("\n") == 1
        unfinished.write_bytes(kept.replace(b'"tokens":7', b'"tokens":' + json.dumps(count).encode()))
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "no unfinished run" in error and error.count("\n") == 1
        unfinished.write_bytes(kept)
    assert main(command) == 0


def test_a_server_without_echo_still_answers_questions(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Known.mode = "no echo"
    assert main(["eval", "--url", url, "--kinds", "choice"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("left out: text: ") and printed.err.count("\n") == 1 and "100%" in printed.out


@pytest.mark.parametrize("content", ["", "{}", '{"format": "other"}', "[" * 100_000, "\xff"])
def test_files_that_are_no_results(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    assert main(["eval", "--compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "no result of `duovolt eval --url --out`" in capsys.readouterr().err


def test_the_coarse_divergence_by_hand_and_as_a_bound() -> None:
    log = math.log
    nats, seen = coarse({"a": log(0.5), "b": log(0.25)}, {"a": log(0.25), "c": log(0.5)})
    assert nats == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75)) and seen == 0.5
    assert coarse({"a": log(0.5)}, {"b": log(0.5)}) == (pytest.approx(0.0, abs=1e-5), 0.0)  # nothing in common
    pick = random.Random(1)
    for _ in range(200):
        p, q = ([pick.random() ** 4 + 1e-9 for _ in range(12)] for _ in range(2))
        p, q = ([value / sum(one) for value in one] for one in (p, q))
        full = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
        tops = [{str(i): log(one[i]) for i in sorted(range(12), key=lambda i: -one[i])[:5]} for one in (p, q)]
        assert 0 <= coarse(*tops)[0] <= full + 1e-9
        every = [{str(i): log(value) for i, value in enumerate(one)} for one in (p, q)]
        assert coarse(*every)[0] == pytest.approx(full, abs=1e-4)


def test_against_another_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--url", url, "--what", "text", "--score-bytes", "400", "--json", "--against", url]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["divergence"]
    assert found["mean"] == pytest.approx(0, abs=1e-9) and found["agreement"] == 1 and found["reference"] == "server"
    assert found["seen"] == pytest.approx(math.exp(-0.5) + 0.3)


def test_against_a_checkpoint_the_bound_holds() -> None:
    """A server that predicts half as sharply as the bundled model: exact for itself, below the full divergence."""
    predictor, text = Predictor(TINY, 64), "Return the value of the named attribute of object."
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rows = predictor.log_probabilities(ids)[:-1]
    names = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    def served(rows: torch.Tensor) -> list[Window]:
        tops = []
        for row in rows:
            best = row.topk(5)
            texts = [tokenizer.decode([int(i)], skip_special_tokens=False) for i in best.indices]
            tops.append(dict(zip(texts, best.values.tolist(), strict=True)))
        return [Window(text, names, [0.0] * len(rows), tops)]

    same = against_directory(served(rows), TINY)
    assert same.mean == pytest.approx(0, abs=1e-5) and same.agreement == 1 and same.tokens == len(ids) - 1
    flat = torch.log_softmax(rows / 2, dim=-1)
    full = float((rows.exp() * (rows - flat)).sum(dim=-1).mean())
    assert 0.1 * full < against_directory(served(flat), TINY).mean < full
    with pytest.raises(InputError, match="other tokens"):
        against_directory([Window(text, list(text), [], [])], TINY)
