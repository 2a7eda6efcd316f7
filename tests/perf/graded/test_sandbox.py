"""The sandbox of answers that are code: what runs, what is stopped, and that nothing is left behind."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from duovolt.perf.graded import sandbox
from duovolt.perf.graded.sandbox import Confinement, confinement, run_code

RIGHT = "assert f(1) == 1"
GOOD = "def f(x):\n    return x\n"


def test_a_right_answer_passes_and_a_wrong_one_says_why() -> None:
    assert run_code(GOOD, RIGHT) == sandbox.Ran(True, "")
    ran = run_code("def f(x): return 2", RIGHT)
    assert not ran.passed and ran.why == "tests: AssertionError: "
    assert "SyntaxError" in run_code("def f(:", RIGHT).why


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "not done after 1 s"),
        ("import time\ntime.sleep(60)", "not done after 1 s"),
        ("x = [0] * 10**10", "MemoryError"),
        ("x = b''\nwhile True: x += bytes(1 << 27)", "MemoryError"),
        ("while True: print('x' * 1000)", "prints without end"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import os\nos._exit(0)", "ended before its tests"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import sys\nprint('00' * 16)\nsys.stdout.flush()\nimport os\nos._exit(0)", "ended before its tests"),
    ],
)
def test_what_would_hang_or_spread_is_stopped_in_time(code: str, why: str) -> None:
    begun = time.monotonic()
    ran = run_code(code + "\n" + GOOD, RIGHT, seconds=1 if "1 s" in why else 5)
    assert not ran.passed and why in ran.why, ran.why
    assert time.monotonic() - begun < 15


def test_no_file_is_written_changed_or_removed(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # one that everybody may reach and write to
    folder.chmod(0o777)
    kept = folder / "kept"
    kept.write_text("mine")
    kept.chmod(0o666)
    for code in (f"open({str(kept)!r}, 'w')", f"import os\nos.remove({str(kept)!r})", "open('here', 'x')",
                 f"import os\nos.open({str(folder / 'new')!r}, os.O_CREAT | os.O_WRONLY)"):  # fmt: skip
        ran = run_code(code + "\n" + GOOD, RIGHT)
        assert not ran.passed and "PermissionError" in ran.why, ran.why
    assert [path.name for path in folder.iterdir()] == ["kept"] and kept.read_text() == "mine"
    kept.unlink()
    folder.rmdir()


def without_hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's limits alone, as if code had got round the hook."""
    source = Path(sandbox.__file__).with_name("inside.py").read_text()
    hook = "    sys.addaudithook(_refuse)\n"
    assert hook in source
    # Modules that a nobody may not be able to read in this interpreter's folder.
    (tmp_path / "inside.py").write_text("import socket, threading\n" + source.replace(hook, ""))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))


def test_the_limits_hold_without_the_hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = confinement()
    without_hook(monkeypatch, tmp_path)
    if os.geteuid() != 0 or where.user is not None:
        assert "BlockingIOError" in run_code("import os\nos.fork()\n" + GOOD, RIGHT).why
        assert "can't start new thread" in run_code("import threading\nthreading.Thread(target=print).start()", "").why
    target = Path(tempfile.mkdtemp())
    target.chmod(0o777)
    ran = run_code(f"file = open({str(target / 'x')!r}, 'w')\nfile.write('x')\nfile.flush()", "")
    assert "File too large" in ran.why
    assert all(path.stat().st_size == 0 for path in target.iterdir())
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    if where.command:
        ran = run_code("import socket\nsocket.socket().connect((b'192.0.2.1', 80))", "")
        assert "unreachable" in ran.why


def test_a_network_attempt_is_refused_by_the_hook_alone() -> None:
    where = Confinement((), None)
    ran = sandbox._run("import socket\nsocket.create_connection(('127.0.0.1', 1))", "", 5, sandbox.MEMORY_BYTES, where)
    assert "the sandbox refuses socket." in ran.why
    ran = sandbox._run("import subprocess\nsubprocess.run(['true'])", "", 5, sandbox.MEMORY_BYTES, where)
    assert "the sandbox refuses" in ran.why


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY_OF_MINE", "secret")
    assert run_code("import os", "assert 'A_KEY_OF_MINE' not in os.environ and os.listdir('.') == []").passed
