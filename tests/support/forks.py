"""`duovolt` commands in processes of their own, forked from one that has their imports behind it.

A fresh interpreter takes most of a second before it does anything, and a test that kills a command at each of its writes
starts dozens. The process that forks has one thread and runs nothing itself, so a child begins as a fresh one would.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

SECONDS = 120


class Commands:
    """Runs commands one after the other. `modules`: of duovolt.cli, imported beforehand.

    A command has the environment and the umask that this process has at the moment, and what `run` is told.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """As subprocess.run: a code of -N for a process that signal N ended."""
        if self._process is None:
            command = [sys.executable, __file__, *self._modules]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            os.umask(mask := os.umask(0))
            job = {
                "words": words,
                "directory": str(directory),
                "environment": {**os.environ, **environment},
                "umask": mask,
                "outputs": folder,
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            out, err = (Path(folder, name).read_text(errors="backslashreplace") for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(10)
            self._process.stdout.close()


def _child(job: dict[str, Any]) -> int:
    os.chdir(job["directory"])
    os.umask(job["umask"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(job["outputs"], name), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.alarm(SECONDS)
    from duovolt.cli.main import main

    code = main(job["words"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def serve(jobs: IO[str], answers: IO[str]) -> None:
    """A job a line, its exit code a line."""
    for line in jobs:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = _child(json.loads(line))
            finally:
                os._exit(code)
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(f"duovolt.cli.{module}")
    serve(sys.stdin, sys.stdout)
