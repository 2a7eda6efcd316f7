"""Runs a command line in forked children, each of which is stopped or fails at another of its writes.

A process of its own forks them, so that no thread of the tests is forked, and the stages are imported once. Every child
gets a directory of its own, a copy of a template where one is given; `@` in the command stands for it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """How one child ended: exit code (negative: a signal) and what it wrote to stderr."""

    code: int
    err: str


class Walker:
    """The process that forks; a context manager."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "duovolt.tests.support.walk"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def __enter__(self) -> "Walker":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def walk(
        self, root: Path, command: Sequence[object], doors: dict[str, dict[str, str]], template: Path | None = None
    ) -> dict[str, Outcome]:
        """Run `command` once for every name in `doors`, in `root`/name, with the environment that the name stands for."""
        job = {
            "root": str(root), "command": [str(word) for word in command], "doors": doors,
            "template": None if template is None else str(template),
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return {name: Outcome(**found) for name, found in json.loads(self._process.stdout.readline()).items()}

    def count_writes(self, root: Path, command: Sequence[object], template: Path | None = None, code: int = 0) -> int:
        """Writes, fsyncs and renames of an unbroken run, which stays in `root`/whole and ends with `code`."""
        counter = root / "count"
        root.mkdir(parents=True, exist_ok=True)
        found = self.walk(root, command, {"whole": {"DUOVOLT_COUNT_WRITES": str(counter)}}, template)["whole"]
        assert found.code == code, found.err
        return int(counter.read_text())


def _child(command: list[str], environment: dict[str, str], log: Path) -> int:
    from duovolt.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.environ.update(environment)
    code = main(command)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run(job: dict) -> dict[str, dict]:
    outcomes = {}
    for name, environment in job["doors"].items():
        place, log = Path(job["root"]) / name, Path(job["root"]) / f"{name}.err"
        place.parent.mkdir(parents=True, exist_ok=True)
        if job["template"] is not None and not place.exists():
            shutil.copytree(job["template"], place)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _child([word.replace("@", str(place)) for word in job["command"]], environment, log)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes[name] = {"code": code, "err": log.read_text()}
    return outcomes


def _import_stages() -> None:
    """Before the forks, once for all children."""
    from duovolt.checkpoint import writer
    from duovolt.cli import convert, dequantize, download, repair, shard, verify

    assert all((convert, dequantize, download, repair, shard, verify))
    writer.MARK_BYTES = 10_000  # the files here are small: a few marks in each, as in large ones


if __name__ == "__main__":
    _import_stages()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
