"""What a trial serves, on each backend: ranks, options, a prompt whose answer is known, and how to be in each phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..conftest import Server
from ..stub_model import ids, make_ranks, write_script

WATCHDOG_SECONDS = 5.0
DRAIN_SECONDS = 30.0
LETTERS = "the quick brown fox jumps over a lazy dog; "
_PLAIN_SECONDS = 300.0
_PHASE_SECONDS = 4.0  # of a long answer or prompt: long enough to be struck in
SHORT, PREFILL = 6, 4  # tokens of an answer; PREFILL: of one to the long prompt


@dataclass
class World:
    """A backend with its `size` ranks.

    long      tokens of an answer that takes some seconds
    plain     the texts of that answer, of which every shorter one is a part, and of that to the long prompt
    """

    backend: str
    ranks: Path
    logs: Path
    options: list[str]
    prompt: Any
    long_prompt: Any = None
    plain: Future[tuple[str, str]] = field(default_factory=Future)
    size: int = 2
    long: int = 90
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def cards(self) -> bool:
        return self.backend == "cuda" and "cpu" not in self.options

    @property
    def expected(self) -> str:
        return self.plain.result(_PLAIN_SECONDS)[0]

    @property
    def expected_of_long(self) -> str:
        return self.plain.result(_PLAIN_SECONDS)[1]

    def shorten(self) -> None:
        """Make do with short answers and prompts: nothing is to befall them."""
        self.long = SHORT
        if self.long_prompt is not None:
            self.long_prompt = self.long_prompt[:40]

    def server(
        self,
        *,
        lanes: int = 2,
        watchdog: float = WATCHDOG_SECONDS,
        before: list[str] | None = None,
        more: Sequence[str] = (),
        **environment: str,
    ) -> Server:
        """A server that is starting; its ranks log their records."""
        arguments = [
            str(self.ranks), *self.options, "--lanes", str(lanes), "--watchdog-seconds", str(watchdog),
            "--drain-seconds", str(DRAIN_SECONDS), *more,
        ]  # fmt: skip
        return Server(arguments, {"DUOVOLT_LOCKSTEP_LOG": str(self.logs)} | environment, before)

    def body(self, tokens: int | None = None, *, long_prompt: bool = False, stream: bool = True) -> dict[str, Any]:
        """A request for `/v1/completions`."""
        prompt = self.long_prompt if long_prompt else self.prompt
        return {"prompt": prompt, "max_tokens": tokens or self.long, "stream": stream, "temperature": 0, **self.extra}


def scripted_world(folder: Path, *, delay_ms: float = 30, size: int = 2) -> World:
    """Answers of single tokens, at a steady pace."""
    text = (LETTERS * 40)[:2000]
    script = write_script(folder / "script.jsonl", {"blocks": [[token] for token in ids(text)], "delay_ms": delay_ms})
    options = ["--backend", f"scripted:{script}"]
    world = World("scripted", make_ranks(folder / "ranks", size), _logs(folder), options, "hi", size=size)
    world.plain.set_result((text, ""))
    return world


def real_world(
    folder: Path,
    backend: str = "reference",
    more: Sequence[str] = (),
    size: int = 2,
    ranks: Path | None = None,
    *,
    asks: bool = True,
) -> World:
    """`ranks`, or those of the fixture's tiny model, served with `more` options; with `asks`, the plain answers are asked for
    once, beside the first trials.

    A card makes thousands of a small model's tokens a second: answers and prompt are longer there. The CUDA engine without
    a card takes half a second for a chunk.
    """
    from ..real_model import make_ranks as make_real_ranks

    cards = backend == "cuda" and "cpu" not in more
    long, prompt = (12000, 15000) if cards else (90, 900 if backend == "cuda" else 3500)
    options = [
        "--backend",
        backend,
        "--max-context",
        str(prompt + 500),
        "--prefill-chunk",
        "32",
        "--drafts",
        "3",
        *more,
    ]
    ranks = ranks or make_real_ranks(folder, size)
    world = World(backend, ranks, _logs(folder), options, [1, 2, 3, 4, 5], size=size, long=long)
    world.long_prompt = [1 + number % 200 for number in range(prompt)]
    world.extra = {"ignore_eos": True}
    if asks:
        threading.Thread(target=_ask_a_server, args=(world,), daemon=True).start()
    return world


def keep_pace(world: World, server: Server) -> bool:
    """Shorten answer and prompt where a ready server would take minutes for a card's: both ranks on one. True if it does."""
    measured, prompt = 64, world.long_prompt or []
    if not (world.backend == "cuda" and len(prompt) > 5000):
        return False

    def seconds(prompt: list[int], tokens: int) -> float:
        start = time.monotonic()
        with server.client(_PLAIN_SECONDS) as client:
            body = world.body(tokens, stream=False) | {"prompt": prompt}
            assert client.post("/v1/completions", json=body).status_code == 200, server.log
        return time.monotonic() - start

    seconds(world.prompt, 1)
    token = seconds(world.prompt, measured) / measured
    if token < 0.005:
        return False
    read = seconds([3 + number % 100 for number in range(640)], 1) / 640
    world.long = min(world.long, max(200, int(_PHASE_SECONDS / token)))
    world.long_prompt = prompt[: max(640, int(_PHASE_SECONDS / read))]
    return True


def ask_plainly(world: World, server: Server) -> None:
    """Let a ready server give the plain answers."""
    texts = []
    with server.client(_PLAIN_SECONDS) as client:
        for body in (world.body(stream=False), world.body(PREFILL, long_prompt=True, stream=False)):
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, f"the plain answer failed: {reply.text}\n{server.log}"
            texts.append(reply.json()["choices"][0]["text"])
    world.plain.set_result((texts[0], texts[1]))


def _ask_a_server(world: World) -> None:
    try:
        server = world.server(watchdog=60)
        try:
            ask_plainly(world, server.wait_ready())
        finally:
            server.kill()
    except BaseException as error:
        world.plain.set_exception(error)


def _logs(folder: Path) -> Path:
    logs = folder / "lockstep"
    logs.mkdir(mode=0o700, exist_ok=True)
    return logs


def log_pairs(logs: Path, pid: int, *, solo: bool = False) -> list[list[list[str]]]:
    """Of each start of the ranks of server `pid`, in order: the lines of both ranks' logs (of the only one, twice)."""
    names = {path.name.partition(".")[0] for path in logs.glob(f"duovolt-{pid}-*.jsonl")}
    pairs = []
    for name in sorted(names, key=lambda name: min(path.stat().st_mtime for path in logs.glob(f"{name}.*"))):
        files = [logs / f"{name}.rank-{rank}.jsonl" for rank in range(2)]
        if solo:
            files[1] = files[0]
        pairs.append([file.read_text().splitlines() if file.exists() else [] for file in files])
    return pairs
