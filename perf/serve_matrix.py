"""The matrix of `bench serve`: context x material x lanes, cold and cached, several seeds, against a running server.

In a cell, a cold answer has a prompt that no one has sent before (a mark stands at its beginning); a cached one has the
prompt of the cell's latest cold answer. Lanes ask at once, each with a prompt of its own.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..checkpoint.errors import InputError
from ..checkpoint.numbers import is_count
from . import materials
from .serve_record import Answer, Head, Journal, Mode, Record, Settings, read_record
from .serve_stream import Endpoint, Streamed

TEMPLATE_TOKENS = 64  # room for what the chat template adds
_SAMPLE = 20_000  # characters whose tokens are counted first
_LOCAL = ("127.0.0.1", "localhost", "::1")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One request a lane."""

    context: int
    material: str
    lanes: int
    mode: Mode
    seed: int

    @property
    def key(self) -> tuple[int, str, int, str, int]:
        return self.context, self.material, self.lanes, self.mode, self.seed

    def describe(self) -> str:
        lanes = f"{self.lanes} lanes" if self.lanes > 1 else "one lane"
        return f"{self.context:,} of {self.material}, {lanes}, seed {self.seed}, {self.mode}"


def steps_of(settings: Settings) -> Iterator[Step]:
    """All steps in order: in every cell a cold answer for the first seeds, a cached one for each."""
    for context in settings.contexts:
        for material in settings.materials:
            for lanes in settings.lanes:
                for seed in range(settings.seeds):
                    if seed < settings.cold_seeds:
                        yield Step(context, material, lanes, "cold", seed)
                    yield Step(context, material, lanes, "cached", seed)


@dataclass(frozen=True)
class Server:
    """What the server says of itself: facts as words, limits None where it does not tell."""

    model: str
    facts: dict[str, str]
    machine: dict[str, str]
    max_context: int | None
    lanes: int | None


def ask_server(endpoint: Endpoint, model: str | None) -> Server:
    """Raises EnvironmentFault if nothing answers, InputError if it serves no such model."""
    found = endpoint.get("/v1/models")
    models = found.get("data") if isinstance(found, dict) else None
    known = [one for one in models or [] if isinstance(one, dict) and isinstance(one.get("id"), str)]
    chosen = next((one for one in known if model in (None, one["id"])), None)
    if chosen is None:
        if model is None or known:
            names = ", ".join(one["id"][:80] for one in known[:8]) or "no model at /v1/models"
            raise InputError(f"{endpoint.url} has {names}: name one with --model.")
        chosen = {"id": model}
    own = chosen.get("duovolt")
    facts = {key: str(value)[:200] for key, value in own.items()} if isinstance(own, dict) else {}
    limit = chosen.get("max_model_len")
    lanes = facts.get("lanes", "")
    return Server(
        chosen["id"],
        facts,
        _machine(endpoint, own is not None),
        limit if type(limit) is int and limit > 0 else None,
        int(lanes) if is_count(lanes) else None,
    )


def _machine(endpoint: Endpoint, ours: bool) -> dict[str, str]:
    """Cards and memory clocks by our server's status page, the driver if it runs on this machine."""
    found: dict[str, str] = {}
    status = endpoint.get("/status") if ours else None
    cards = status.get("cards") if isinstance(status, dict) else None
    for card in cards if isinstance(cards, list) else []:
        if isinstance(card, dict):
            key = f"card {card.get('index')}"
            found[key] = f"{str(card.get('name'))[:80]}, memory at {str(card.get('memory_clock'))[:10]} MHz"
    if urlsplit(endpoint.url).hostname in _LOCAL:
        from .machine import driver_version

        if (driver := driver_version()) is not None:
            found["driver"] = driver
    return found


class Matrix:
    """A run over the steps that are not yet done."""

    def __init__(self, endpoint: Endpoint, server: Server, record: Record, journal: Journal) -> None:
        self.endpoint, self.server, self.journal = endpoint, server, journal
        self.head, self.settings = record.head, record.head.settings
        self.answers = list(record.answers)
        self._done = record.done
        self._texts: dict[tuple[int, str], str] = {}
        self._sent: set[str] = set()  # marks of prompts that this process has sent
        self._mark = f"{self.head.run}.{secrets.token_hex(2)}"  # a killed run may have sent its next prompt already

    def left(self) -> list[Step]:
        """Steps still to do. Those that do not fit the server are left out; `skipped` tells which."""
        return [step for step in steps_of(self.settings) if step.key not in self._done and self._why_not(step) is None]

    def skipped(self) -> list[str]:
        """Cells that the server cannot do, and why."""
        reasons = {(s.context, s.lanes): why for s in steps_of(self.settings) if (why := self._why_not(s)) is not None}
        return list(dict.fromkeys(reasons.values()))

    def _why_not(self, step: Step) -> str | None:
        limit, lanes = self.server.max_context, self.server.lanes
        if limit is not None and step.context > limit:
            return f"context {step.context:,}: the server takes {limit:,}"
        if lanes is not None and step.lanes > lanes:
            return f"{step.lanes} lanes: the server has {lanes}"
        return None

    def run(self, step: Step, advance: Report = lambda text: None) -> list[Answer]:
        """Do a step: an answer of every lane, written to the journal. Raises what `Endpoint.stream` raises."""
        cold = step.seed if step.mode == "cold" else min(step.seed, self.settings.cold_seeds - 1)
        text = self._text(step.context, step.material)
        name = f"{self._mark}-{step.context}-{step.material}-{step.lanes}-{max(cold, 0)}"
        marks = [f"{name}-{lane}" for lane in range(step.lanes)]
        prompts = [materials.prompt(step.material, text, mark) for mark in marks]
        if step.mode == "cached" and not self._sent.issuperset(marks):
            advance("fills the cache again")  # an earlier process sent them, or the server was started anew
            self._ask(prompts, step.seed, 1)
        assert step.mode == "cached" or self._sent.isdisjoint(marks), "a cold prompt was sent before"
        advance("waits for the first token")
        streamed = self._ask(prompts, step.seed, self.settings.tokens)
        self._sent.update(marks)
        found = [Answer(*step.key, lane, **asdict(one)) for lane, one in enumerate(streamed)]  # type: ignore[arg-type]
        self.journal.add(found)
        self.answers += found
        return found

    def _ask(self, prompts: list[str], seed: int, tokens: int) -> list[Streamed]:
        bodies: list[dict[str, Any]] = []
        for lane, text in enumerate(prompts):
            body: dict[str, Any] = {
                "model": self.server.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                "seed": 1000 * seed + lane, "temperature": self.settings.temperature, "stream": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            bodies.append(body | ({"ignore_eos": True} if self.settings.ignore_eos else {}))
        if len(bodies) == 1:
            return [self.endpoint.stream(bodies[0])]
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.endpoint.stream, bodies))

    def _text(self, context: int, material: str) -> str:
        """As much of the material as leaves room for the answer in `context` tokens, by the server's own count."""
        if (context, material) not in self._texts:
            room = context - self.settings.tokens - TEMPLATE_TOKENS
            frame = materials.prompt(material, "", f"{self._mark}-{context}-{material}-0-0-0")
            sample = materials.text_of(material, min(_SAMPLE, 8 * context))
            counted = [self._count(frame), self._count(sample)]
            room -= counted[0]
            if room < 1:
                raise InputError(f"--contexts {context}: no room for a prompt beside {self.settings.tokens} tokens.")
            text = materials.text_of(material, max(1, room * len(sample) // counted[1]))
            exact = self.endpoint.count_tokens(text)
            for _ in range(3):
                if exact is None or room * 0.98 <= exact <= room:
                    break
                text = materials.text_of(material, max(1, len(text) * room // exact - len(text) // 100))
                exact = self.endpoint.count_tokens(text)
            self._texts[context, material] = text
        return self._texts[context, material]

    def _count(self, text: str) -> int:
        """Tokens by `/tokenize`, or by asking for one token and reading the usage."""
        count = self.endpoint.count_tokens(text)
        if count is None:
            count = self._ask([text], 0, 1)[0].prompt_tokens
        return max(1, count)


def count_materials(endpoint: Endpoint, names: Iterable[str]) -> dict[str, int]:
    """Tokens of each material in its published length, by the server's `/tokenize`; those that it does not count are left out."""
    counts = {name: endpoint.count_tokens(materials.published(name)) for name in names}
    return {name: count for name, count in counts.items() if count is not None}


def open_run(
    path: Path | None,
    server: Server,
    settings: Settings,
    machine: dict[str, str],
    counted: Callable[[], dict[str, int]] = dict,
) -> tuple[Record, Journal]:
    """A new run, or the one that `path` holds. Raises InputError if that one has other settings or another model.

    `counted`: tokens of the materials, asked for a new run.
    """
    if path is not None and path.exists() and path.stat().st_size:
        record = read_record(path)
        if record.head.settings != settings:
            raise InputError(f"{path}: holds a run with other settings. Name another --out, or repeat its options.")
        told = (record.head.model, record.head.server.get("conversion_id"))
        if told != (server.model, server.facts.get("conversion_id")):
            raise InputError(f"{path}: holds a run of {told[0]!r}, conversion {told[1]}; the server has another.")
        return record, Journal(path, record.head, True)
    record = Record(Head.new(server.model, settings, server.facts, server.machine | machine, counted()), [])
    return record, Journal(path, record.head, False)
