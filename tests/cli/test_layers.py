"""Where the options of `serve` come from: command line before environment before file before defaults."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.cli import layers
from duovolt.cli import serve as command
from duovolt.cli.main import main
from duovolt.runtime.proxy import server
from duovolt.runtime.proxy.options import ServeOptions


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `duovolt serve` with these words would start with."""
    for name in [name for name in os.environ if name.startswith("DUOVOLT_")]:
        monkeypatch.delenv(name)
    started: list[ServeOptions] = []
    monkeypatch.setattr(server, "serve", lambda given: started.append(given) or 0)

    def run(*words: str | Path) -> ServeOptions:
        parser = argparse.ArgumentParser()
        command.configure(parser)
        parser.add_argument("--quiet", action="store_true")
        assert command.run(parser.parse_args([str(word) for word in words])) == 0
        return started.pop()

    return run


def test_defaults_are_those_of_the_options(options: Any) -> None:
    assert options("ranks") == ServeOptions(Path("ranks"))


@pytest.mark.parametrize("name", ["Qwen/Qwen3.8-27B", "gpt-4o", "模型:v1"])
def test_a_model_is_called_as_its_owner_likes(options: Any, name: str) -> None:
    assert options("ranks", "--served-model-name", name).served_model_name == name


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak", "x" * 201, "null\0", "slash/"])
def test_a_name_that_would_break_a_line_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "ranks", "--served-model-name", name]) == 2
    assert "is no name of a model: 1 to 200 printable characters, no spaces" in capsys.readouterr().err


def test_a_script_lies_beside_the_file_that_names_it(options: Any, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('ranks = "ranks"\nbackend = "scripted:script.jsonl"\n')
    assert options("--config", tmp_path / "serve.toml").backend == f"scripted:{tmp_path / 'script.jsonl'}"
    (tmp_path / "serve.toml").write_text('ranks = "ranks"\nbackend = "scripted:/script.jsonl"\n')
    assert options("--config", tmp_path / "serve.toml").backend == "scripted:/script.jsonl"
    assert options("ranks", "--backend", "scripted:script.jsonl").backend == "scripted:script.jsonl"


def test_each_layer_goes_before_the_next(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'ranks = "ranks"\nlanes = 2\nport = 1\ndrafts = 1\nmax_context = 99\nlog-content = true\nlog-requests = "-"\n'
        'cors-origin = ["https://a", "https://b"]\ndrain-seconds = 2.5\napi-key-file = "/keys"\n'
    )
    monkeypatch.setenv("DUOVOLT_PORT", "2")
    monkeypatch.setenv("DUOVOLT_DRAFTS", "2")
    monkeypatch.setenv("DUOVOLT_LOG_CONTENT", "no")
    found = options("--config", file, "--drafts", "5", "--cors-origin", "*")
    assert found == ServeOptions(
        ranks=tmp_path / "ranks", lanes=2, port=2, drafts=5, max_context=99, log_content=False, log_requests=Path("-"),
        cors_origin=("*",), drain_seconds=2.5, api_key_file=Path("/keys"),
    )  # fmt: skip
    monkeypatch.setenv("DUOVOLT_CONFIG", str(file))
    monkeypatch.setenv("DUOVOLT_CORS_ORIGIN", "https://c,https://d")
    found = options("elsewhere", "--log-content")
    assert (found.ranks, found.lanes, found.log_content) == (Path("elsewhere"), 2, True)
    assert found.cors_origin == ("https://c", "https://d")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lane = 2", "no option 'lane'; the nearest is 'lanes'"),
        ("max_contex = 2", "no option 'max_contex'; the nearest is 'max-context'"),
        ("[server]\nport = 1", "no option 'server'; the nearest is"),
        ("lanes = 9", "lanes: '9' is not a whole number, 1 to 4"),
        ("lanes = true", "lanes: a truth value"),
        ("lanes = [1]", "lanes: a list, where one value is expected"),
        ("port = 1.5", "port: '1.5' is not a whole number"),
        ("drain-seconds = nan", "drain-seconds: 'nan' is not a number of seconds, 0 or more"),
        ("max-wait-seconds = 0", "max-wait-seconds: '0' is not a number of seconds, above 0"),
        ("log-content = 'perhaps'", "'perhaps' is neither true nor false"),
        ("cors-origin = [['a']]", "cors-origin: a list, where one value is expected"),
        ("max-waiting = 1\nmax_waiting = 2", "stands there twice"),
        ("lanes = ", "not TOML"),
        (b"\xff", "not TOML"),
        ("a = " + "[" * 100_000, "not TOML"),
        ("port = " + "9" * 5000, "not TOML"),
        ("port = '" + "9" * 5000 + "'", "is not a whole number, 0 to 65535"),
        ("prefix-cache = '" + "9" * 5000 + "G'", "is neither off nor a size"),
        ("plain-weights = 'much'", "is neither auto, off nor a size"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_name_and_key(
    options: Any, tmp_path: Path, text: str | bytes, words: str
) -> None:
    file = tmp_path / "serve.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as refusal:
        options("ranks", "--config", file)
    assert words in str(refusal.value) and str(file) in str(refusal.value)


def test_a_variable_near_an_option_is_refused_and_another_is_named(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUOVOLT_KERNELS", "/kernels")
    assert options("ranks") == ServeOptions(Path("ranks"))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DUOVOLT_WEATHER", "fine")
    assert options("ranks") == ServeOptions(Path("ranks"))
    assert capsys.readouterr().err == "duovolt: DUOVOLT_WEATHER is no option's variable; it does nothing.\n"
    monkeypatch.setenv("DUOVOLT_MAX_CONTXT", "9")
    with pytest.raises(
        InputError, match="DUOVOLT_MAX_CONTXT is no option's variable; did you mean DUOVOLT_MAX_CONTEXT"
    ):
        options("ranks")
    monkeypatch.delenv("DUOVOLT_MAX_CONTXT")
    monkeypatch.setenv("DUOVOLT_LANES", "many")
    with pytest.raises(InputError, match="DUOVOLT_LANES: 'many' is not a whole number, 1 to 4"):
        options("ranks")


def test_every_variable_that_the_project_reads_is_known() -> None:
    root = Path(__file__).parents[2]
    known = {option.variable for option in command.server_options()} | layers._OTHERS
    known |= {f"DUOVOLT_{name}" for name in ("CONFIG", "RANKS", "NAME", "MAX_CONTEXT")}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] not in ("tests", ".types", ".venv", "build") and parts[0][0] != ".":
            found = set(re.findall(r"DUOVOLT_[A-Z_]+[A-Z]", path.read_text()))
            assert found <= known, (path, found - known)


def test_what_does_not_go_together_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["serve"], "RANKS is missing"),
        (["serve", "x", "--log-content"], "--log-content has no effect here: it is read only with --log-requests."),
        (["serve", "x", "--config", str(tmp_path / "none")], "No such file"),
        (["serve", "x", "--cors-origin", "https://a/b"], "--cors-origin https://a/b: expected scheme://host"),
        (["serve", "x", "--tls-cert", "y"], "without --tls-key"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
