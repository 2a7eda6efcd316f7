"""The command line as a whole: help, usage, exit codes, one message an error."""

import errno
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.cli import main as cli

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"
VISIBLE = [name for name in cli.COMMANDS if name not in cli.HIDDEN]


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
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
    assert cli.main(["shard", "a", "b"]) == 2  # no default width
    assert "--tp" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--lanes", "x"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("duovolt bench serve: argument --lanes: 'x' is not a whole number") and error.count("\n") == 1
    )
    assert "`duovolt bench serve --help`" in error


def while_interrupted(fault: Exception) -> Exception:
    """A fault that came of an interrupt in the middle of something, as of a graph's capture."""
    fault.__context__ = KeyboardInterrupt()
    return fault


@pytest.mark.parametrize(
    "fault, code, words",
    [
        (InputError("x.json: bad."), 2, "duovolt: x.json: bad.\n"),
        (CheckFailed("a word differs."), 1, "duovolt: a word differs.\n"),
        (EnvironmentFault("the disk is full."), 3, "duovolt: the disk is full.\n"),
        (KeyboardInterrupt(), 130, "duovolt: interrupted.\n"),
        (while_interrupted(RuntimeError("capturing stream has unjoined work")), 130, "duovolt: interrupted.\n"),
        (MemoryError(), 3, "duovolt: out of memory.\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "duovolt: out of memory.\n"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 3, "duovolt: out of memory.\n"),
        (OSError(errno.EIO, "Input/output error", "/mnt/x"), 3, "duovolt: /mnt/x: Input/output error.\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "y"),
            2,
            "duovolt: y: No such file or directory.\n",
        ),
        (ModuleNotFoundError("no", name="starlette"), 3, "'starlette' is missing"),
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


def interrupted(body: str) -> subprocess.CompletedProcess[str]:
    """A command that does `body`, with what a shell's command line has around it."""
    program = (
        "import os, signal, sys, importlib; from duovolt.cli import main\n"
        f"def run(args):\n    {body}\n"
        "importlib.import_module('duovolt.cli.inspect').run = run; sys.argv[1:] = ['inspect', 'x']; main.entry()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_an_interrupt_that_a_library_swallows_and_fails_of_is_one() -> None:
    swallowed = "try: os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: pass\n    "
    failed = interrupted(swallowed + "raise ImportError('cannot load module more than once per process')")
    assert (failed.returncode, failed.stderr) == (130, "duovolt: interrupted.\n")
    told = interrupted(swallowed + "from duovolt.checkpoint.errors import InputError; raise InputError('no file x')")
    assert (told.returncode, told.stderr) == (2, "duovolt: no file x\n")
    assert interrupted(swallowed + "return 0").returncode == 0
    ignored = interrupted("raise ImportError('half')")
    assert ignored.returncode == 1 and "unexpected ImportError" in ignored.stderr


@pytest.mark.parametrize("module", ["kernels.attention", "perf.divergence", "perf.doctor.probes"])
def test_numpy_is_imported_before_torch_which_would_swallow_an_interrupt_in_it(module: str) -> None:
    program = (
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print('numpy' in sys.modules); sys.exit()\n"
        f"sys.meta_path.insert(0, Watch()); import duovolt.{module}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout in ("True\n", "") and done.stderr == ""


def piped(command: str, **environment: str) -> tuple[int, str]:
    """Exit code of the duovolt command in a shell pipeline whose reader leaves at once, and what stderr got."""
    program = f'set -o pipefail; {sys.executable} -m duovolt {command} | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=os.environ | environment)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "--version", "plan {fixture}", "inspect {fixture}", "convert --help"])
def test_a_reader_that_leaves_is_no_crash(command: str, unbuffered: str) -> None:
    code, stderr = piped(command.format(fixture=FIXTURE), PYTHONUNBUFFERED=unbuffered)
    assert code in (0, 1) and stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_failed_proof_stays_one_when_nobody_reads(tmp_path: Path, unbuffered: str) -> None:
    source, converted = tmp_path / "source", tmp_path / "converted"
    shutil.copytree(FIXTURE, source)
    assert cli.main(["convert", str(source), str(converted), "--quiet"]) == 0
    shard = next(converted.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    code, stderr = piped(f"verify --converted {converted}", PYTHONUNBUFFERED=unbuffered)
    assert code == 1 and "Traceback" not in stderr


@pytest.mark.parametrize("command", ["inspect", "plan", "ledger"])
def test_a_folder_of_ranks_in_place_of_one_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}-of-2").mkdir()
    assert cli.main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"name one of them, such as {tmp_path}/rank-0-of-2." in said and said.count("\n") == 1


def test_a_full_output_device_is_the_environments_fault() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "duovolt", "inspect", FIXTURE], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 3 and b"No space left" in done.stderr and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", ["o\udcff", "n" * 300])
def test_odd_paths_are_the_users_to_mend(name: str) -> None:
    for command in (["inspect", name], ["convert", name, "x"], ["verify", "--converted", name]):
        done = subprocess.run([sys.executable, "-m", "duovolt", *command], capture_output=True)
        assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stderr.count(b"\n") == 1


def test_an_interrupt_during_imports_is_an_interrupt() -> None:
    program = (
        "import sys, types\n"
        "class Interrupted(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        raise KeyboardInterrupt\n"
        "sys.modules['duovolt.cli.main'] = Interrupted('duovolt.cli.main')\n"
        "import duovolt.__main__\n"
        "duovolt.__main__.entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "duovolt: interrupted.\n")
