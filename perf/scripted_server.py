"""A `duovolt serve` over scripted answers in the bundled tokenizer, as a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..checkpoint.errors import EnvironmentFault
from ..runtime.parallel.unwinding import unwound_by_signals
from ..runtime.proxy.tokenizer import END_THINK, TextTokenizer

_START_SECONDS = 60
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ScriptedServer:
    """`host`, `port` of a ready server, the pids of proxy and ranks, what every answer holds, and the request log."""

    host: str
    port: int
    proxy: int
    ranks: list[int]
    tokens: list[int]
    tokenizer: TextTokenizer
    log: Path


@contextlib.contextmanager
def scripted_server(tokens: int, delay_ms: float, lanes: int, size: int) -> Iterator[ScriptedServer]:
    """Serve answers of `tokens` tokens of plain text, one a round. Raises EnvironmentFault if it will not start."""
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="duovolt-bench-") as folder:
        ranks = _folders(Path(folder) / "ranks", size)
        tokenizer = TextTokenizer(ranks / f"rank-0-of-{size}")
        ids = _text(tokenizer, tokens)
        script, log = Path(folder) / "script.jsonl", Path(folder) / "requests.jsonl"
        script.write_text(json.dumps({"blocks": [[token] for token in ids], "delay_ms": delay_ms}) + "\n")
        command = [sys.executable, "-m", __package__.partition(".")[0], "serve", str(ranks), "--port", "0"]
        command += ["--backend", f"scripted:{script}", "--lanes", str(lanes), "--log-requests", str(log)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            host, port = _wait_ready(process)
            yield ScriptedServer(host, port, process.pid, _children(process.pid), ids, tokenizer, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


def _folders(ranks: Path, size: int) -> Path:
    with resources.as_file(resources.files(f"{__package__.partition('.')[0]}.tiny") / "checkpoint") as checkpoint:
        for rank in range(size):
            folder = ranks / f"rank-{rank}-of-{size}"
            folder.mkdir(parents=True)
            for name in _FILES:
                shutil.copy(checkpoint / name, folder / name)
    return ranks


def _text(tokenizer: TextTokenizer, count: int) -> list[int]:
    """The end of thinking and then held-out text, again and again; only tokens that show something by themselves."""
    text = (resources.files(f"{__package__.partition('.')[0]}.tiny") / "heldout.txt").read_text(encoding="utf-8")
    end = tokenizer.marker(END_THINK)
    assert end is not None
    ids = [token for token in tokenizer.encode(text[: 4 * count]) if tokenizer.decode([token]).strip("\n\ufffd ")]
    return ([end] + ids * (1 + count // max(len(ids), 1)))[:count]


def _wait_ready(process: subprocess.Popen[str]) -> tuple[str, int]:
    lines: list[str] = []
    found: list[tuple[str, int]] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"ready on http://([^:]+):(\d+)", line):
                found.append((match[1], int(match[2])))
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(_START_SECONDS) or not found:
        raise EnvironmentFault(f"the server did not start: {''.join(lines[-3:]).strip() or 'it said nothing'}")
    return found[0]


def _children(pid: int) -> list[int]:
    """Ranks of a proxy, in the order they were started."""
    time.sleep(0.05)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return sorted(found)
