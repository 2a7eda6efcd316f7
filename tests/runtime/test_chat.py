"""`duovolt chat` against a running server, and what it says when there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duovolt.cli.main import main

from .conftest import Server, running
from .stub_model import blocks, make_ranks, write_script


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chat")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Think.\n</think>\n\nHello world €😀", 2)})
    (folder / "key").write_text("secret")
    yield from running(
        make_ranks(folder / "ranks", 1), "--backend", f"scripted:{script}", "--api-key-file", folder / "key"
    )


@pytest.fixture
def chat(server: Server, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "key").write_text("secret\n")

    def run(
        *arguments: str, url: str = server.url, key: bool = True, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "duovolt", "chat", "--url", url, *arguments]
        command += ["--api-key-file", str(tmp_path / "key")] if key else []
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)

    return run


def test_one_question_prints_the_answer_and_keeps_thoughts_apart(
    chat: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = chat("--once", "hi")
    assert (done.returncode, done.stdout) == (0, "Hello world €😀\n")
    thoughts, blank, timings = done.stderr.splitlines()
    assert (thoughts, blank) == ("Think.", "") and timings.startswith("(first token after ") and timings.endswith(")")
    assert chat("--once", "hi", "--quiet").stderr == ""
    short = chat("--once", "hi", "--max-tokens", "15")
    assert "(cut at the length limit)" in short.stderr


def test_a_conversation_from_a_pipe_ends_with_its_input(chat: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = chat("--quiet", text="one\n\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "Hello world €😀\n" * 2)


def test_refusals_and_absence_have_their_exit_codes(
    chat: Callable[..., subprocess.CompletedProcess[str]], server: Server
) -> None:
    wrong = chat("--once", "hi", key=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "duovolt: the server answered 401: wrong or missing API key\n"
    long = chat("--once", "hi", "--max-tokens", "100000")
    assert long.returncode == 2
    assert "context is 32768 tokens" in long.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        absent = chat("--once", "hi", url=f"http://127.0.0.1:{free.getsockname()[1]}")
    assert absent.returncode == 3
    assert "no server at http://127.0.0.1" in absent.stderr and "duovolt serve" in absent.stderr
    plain = chat("--once", "hi", url=server.url.replace("http", "https"))
    assert plain.returncode == 3 and "what listens there does not speak TLS" in plain.stderr
    nonsense = chat("--once", "hi", url="nonsense")
    assert nonsense.returncode == 2
    assert nonsense.stderr == "duovolt: --url nonsense: begin it with http:// or https://.\n"


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "hot"])
def test_a_temperature_that_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["chat", "--once", "hi", f"--temperature={value}"]) == 2
    assert f"{value!r} is not a number, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (["--once", b"a\xff"], b"", "duovolt: --once: character 2 is not valid UTF-8.\n"),
        (["--once", "a", "--system", b"\xff"], b"", "duovolt: --system: character 1 is not valid UTF-8.\n"),
        ([], b"a\xff\n", "duovolt: the input"),
        (["--once", "a", "--api-key-file", "KEY"], b"", "byte 0 is not ASCII"),
    ],
)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_are_one_message(
    tmp_path: Path, arguments: list[str | bytes], text: bytes, words: str, locale: str
) -> None:
    (tmp_path / "KEY").write_bytes(b"\xff")
    command = [sys.executable, "-m", "duovolt", "chat", "--quiet", "--url", "http://127.0.0.1:9", *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, cwd=tmp_path, env=os.environ | {"LC_ALL": locale}, timeout=30
    )
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines(keepends=True)
    assert line.startswith("duovolt: ") and words in line
