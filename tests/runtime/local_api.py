"""The HTTP application in this process, over a scripted engine without rank processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx

from duovolt.runtime.messages import CancelRequest, GenerateRequest
from duovolt.runtime.proxy.app import Api
from duovolt.runtime.proxy.group import RankView
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.proxy.options import ServeOptions
from duovolt.runtime.proxy.plan import make_plan
from duovolt.runtime.proxy.workers import Workers
from duovolt.runtime.rank.scripted import ScriptedAnswer, ScriptedEngine

from .stub_model import write_script

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"


class ReadySupervisor:
    """Ranks that are always well."""

    ready = True
    step_age = 0.0
    facts: dict[str, str] = {"kv": "none"}

    def views(self) -> list[RankView]:
        return []


class LocalApi:
    """`post` one body and get status and JSON, or the events of a stream. Each call starts the script anew."""

    def __init__(self, ranks: Path, script: Path, **options: Any) -> None:
        self.plan = make_plan(ServeOptions(ranks=ranks, backend=f"scripted:{script}", **options))
        self.sent: list[GenerateRequest | CancelRequest] = []
        self.answers: list[ScriptedAnswer] = []

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        response = self.request(
            "POST", path, content=body if isinstance(body, bytes) else json.dumps(body), headers=headers
        )
        if response.headers["content-type"].startswith("text/event-stream"):
            return response.status_code, read_events(response.text)
        return response.status_code, response.json()

    def request(self, verb: str, path: str, **arguments: Any) -> httpx.Response:
        return asyncio.run(self._request(verb, path, arguments))

    def say(self, blocks: list[list[int]], path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Post a body that one scripted answer, given in blocks, replies to."""
        self.answers = [ScriptedAnswer(blocks)]
        return self.post(path, body, **headers)

    async def _request(self, verb: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        hub = self.hub = Hub(self.plan.options.lanes, self.plan.options.max_waiting)
        engine = ScriptedEngine(self.answers, 4, None)
        self.sent = []

        def step() -> None:
            if engine.has_work():
                hub.relay(engine.step()[1])
                asyncio.get_running_loop().call_soon(step)

        def send(message: GenerateRequest | CancelRequest) -> None:
            self.sent.append(message)
            if isinstance(message, CancelRequest):
                engine.cancel(message.request_id)
            else:
                engine.add(message)
                asyncio.get_running_loop().call_soon(step)

        hub.send = send
        transport = httpx.ASGITransport(Api(self.plan, hub, ReadySupervisor(), Workers(4)).application())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await client.request(verb, path, **arguments)


def read_events(text: str) -> list[Any]:
    """The data of server-sent events; an event's name must be its type."""
    found = []
    for event in filter(None, text.split("\n\n")):
        *names, data = event.split("\n")
        assert data.startswith("data: ") and len(names) <= 1, event
        value = data.removeprefix("data: ")
        found.append(value if value == "[DONE]" else json.loads(value))
        assert [f"event: {found[-1]['type']}"] == names if names else not str(found[-1]).startswith("{'type'")
    return found


def bundled_api(folder: Path, **options: Any) -> LocalApi:
    """The bundled model's tokenizer, template and processors in `folder`/ranks, its answers scripted."""
    ranks = folder / "ranks" / "rank-0-of-1"
    ranks.mkdir(parents=True)
    for file in [*TINY.glob("*.json"), TINY / "chat_template.jinja"]:
        shutil.copy(file, ranks)
    script = write_script(folder / "script.jsonl", {"blocks": [[100, 3026]]})
    return LocalApi(ranks.parent, script, max_context=600, **options)
