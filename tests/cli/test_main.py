"""The command line as a whole: help, usage, exit codes, one message an error."""

import errno
import importlib

import pytest

from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.cli import main as cli

VISIBLE = [name for name in cli.COMMANDS if name not in cli.HIDDEN]


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"duovolt {command}" in text and "--quiet" in text and "--debug" in text
    if command in VISIBLE:
        assert "example" in text and text.count(f"duovolt {command}") >= 2


def test_help_lists_every_command_and_its_first_line_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: duovolt COMMAND")
    assert all(f"  {name}" in text for name in VISIBLE)


def test_bad_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["convrt"]) == 2
    assert "no command 'convrt'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["shard", "a", "b"])  # no default width
    assert stopped.value.code == 2 and "--tp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault, code, words",
    [
        (InputError("x.json: bad."), 2, "duovolt: x.json: bad.\n"),
        (CheckFailed("a word differs."), 1, "duovolt: a word differs.\n"),
        (EnvironmentFault("the disk is full."), 3, "duovolt: the disk is full.\n"),
        (KeyboardInterrupt(), 130, "duovolt: interrupted.\n"),
        (MemoryError(), 3, "duovolt: out of memory.\n"),
        (OSError(errno.EIO, "Input/output error", "/mnt/x"), 3, "duovolt: /mnt/x: Input/output error.\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "y"),
            2,
            "duovolt: y: No such file or directory.\n",
        ),
        (ModuleNotFoundError("no", name="fastapi"), 3, "'fastapi' is missing"),
        (ZeroDivisionError("oops"), 1, "unexpected ZeroDivisionError: oops. Run again with --debug"),
    ],
)
def test_every_kind_of_fault_is_one_message_and_its_code(
    fault: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise fault

    module = importlib.import_module("duovolt.cli.inspect")
    monkeypatch.setattr(module, "run", fail)
    assert cli.main(["inspect", "somewhere"]) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
    with pytest.raises(type(fault)):
        cli.main(["inspect", "somewhere", "--debug"])
