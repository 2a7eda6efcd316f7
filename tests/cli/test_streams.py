"""Standard streams that are closed, full, or read by nobody: no verdict changes, and no file is written to by mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`words` after `duovolt`, as a shell runs them; standard error is read, if they leave it open."""
    command = f"{sys.executable} -m duovolt {words}"
    return subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, env=os.environ | environment, timeout=60
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_change_no_exit_code(closed: str) -> None:
    fine, bad = shell(f"inspect {FIXTURE} {closed}"), shell(f"inspect nowhere {closed}")
    assert (fine.returncode, bad.returncode) == (0, 2)
    assert fine.stderr == "" and bad.stderr.count("\n") == ("2>" not in closed)


def test_closed_streams_are_the_null_device_and_no_file_takes_their_number(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from duovolt.cli.streams import settle_streams; settle_streams(); "
        f"file = open({str(tmp_path / 'x')!r}, 'w'); print('to', 'nobody'); print('nor', file=sys.stderr); "
        f"sys.stdin.read(); Path({str(tmp_path / 'said')!r}).write_text("
        "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    done = subprocess.run(["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "said").read_text() == "/dev/null /dev/null /dev/null"
    assert (tmp_path / "x").read_text() == ""


def test_children_have_the_null_device_where_a_stream_is_closed() -> None:
    child = "import os, sys; sys.exit(sum(os.readlink(f'/proc/self/fd/{n}') == '/dev/null' for n in range(3)))"
    program = (
        "import subprocess, sys; from duovolt.cli.streams import settle_streams; settle_streams(); "
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    done = subprocess.run(["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program], timeout=60)
    assert done.returncode == 3


def test_help_that_nobody_reads_to_its_end_is_no_failure() -> None:
    assert shell("serve --help | head -c 1; exit ${PIPESTATUS[0]}").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_words_that_cannot_be_said_change_no_exit_code(unbuffered: str) -> None:
    assert shell("inspect nowhere 2>/dev/full", PYTHONUNBUFFERED=unbuffered).returncode == 2
    assert shell("inspect nowhere 2> >(true)", PYTHONUNBUFFERED=unbuffered).returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["inspect {0}", "plan {0} --json", "--help", "serve --help"])
def test_a_full_standard_output_is_named(command: str, unbuffered: str) -> None:
    done = shell(f"{command.format(FIXTURE)} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (3, "duovolt: standard output: No space left on device.\n")


def test_a_full_disk_under_a_report_is_named(tmp_path: Path) -> None:
    done = shell(f"convert {FIXTURE} {tmp_path / 'converted'} --quiet --json /dev/full")
    assert (done.returncode, done.stderr) == (3, "duovolt: /dev/full: No space left on device.\n")


def test_a_file_that_may_grow_no_further_is_named(tmp_path: Path) -> None:
    """As on file systems that hold 4 GB a file at most."""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 16; "$@"', "-", sys.executable, "-m", "duovolt", "convert", FIXTURE, tmp_path / "c"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, f"duovolt: {tmp_path / 'c'}: File too large.\n")
