"""Long prompts: refused before they are encoded where no context holds them, and never in the way of others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.proxy.errors import ApiError
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.proxy.prompt import encode_prompt
from duovolt.runtime.proxy.schema import GenerationDefaults
from duovolt.runtime.proxy.service import Service
from duovolt.runtime.proxy.tokenizer import TextTokenizer
from duovolt.runtime.proxy.workers import Workers

from .conftest import wait_gone
from .stub_model import PLAIN, SPECIAL, make_directory
from .test_serve import Start, setup

LONGEST = max(map(len, PLAIN + SPECIAL))


def changed(folder: Path, **changes: Any) -> TextTokenizer:
    directory = make_directory(folder)
    document = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(document | changes))
    return TextTokenizer(directory)


NFC = {"type": "NFC"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": False}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, LONGEST),
        ({"normalizer": NFC}, 4 * LONGEST),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [NFC]}}, None),
        ({"pre_tokenizer": sequence(split("Isolated"), BYTES)}, LONGEST),
        ({"pre_tokenizer": sequence(split("Removed"), BYTES)}, None),
        ({"pre_tokenizer": sequence({"type": "WhitespaceSplit"}, BYTES)}, None),
    ],
)
def test_the_bound_is_known_only_where_no_text_is_dropped(
    tmp_path: Path, changes: dict[str, Any], most: int | None
) -> None:
    assert changed(tmp_path, **changes).most_bytes_per_token == most


def test_no_bound_where_an_added_token_swallows_space_or_a_byte_has_no_letter(tmp_path: Path) -> None:
    document = json.loads((make_directory(tmp_path / "plain") / "tokenizer.json").read_text())
    greedy = [entry | {"lstrip": True} for entry in document["added_tokens"]]
    assert changed(tmp_path / "swallowing", added_tokens=greedy).most_bytes_per_token is None
    vocabulary = {letter if letter != "q" else "qq": token for letter, token in document["model"]["vocab"].items()}
    deaf = changed(tmp_path / "deaf", model=document["model"] | {"vocab": vocabulary})
    assert deaf.most_bytes_per_token is None


def test_composition_never_shrinks_text_more_than_the_bound_says() -> None:
    sources: dict[str, int] = {}
    characters = [chr(code) for code in range(0x110000) if unicodedata.decomposition(chr(code))[:1] not in ("", "<")]
    for character in characters:
        apart = unicodedata.normalize("NFD", character)
        sources[apart] = max(sources.get(apart, 0), len(character.encode()))
    results = {unicodedata.normalize("NFC", character) for character in characters}
    longest = {
        result: sum(sources.get(part, len(part.encode())) for part in unicodedata.normalize("NFD", result))
        for result in results
    }
    assert max(size / len(character.encode()) for character, size in longest.items()) == 3.5
    assert unicodedata.normalize("NFC", "\u1fbe\u0308\u0301") == "\u0390"


@pytest.fixture(scope="module")
def nfc(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return changed(tmp_path_factory.mktemp("nfc"), normalizer=NFC)


PARTS = [*"aHelo wrd", "\u1fbe", "\u0308", "\u0301", "\u212a", "\ud55c", "<think>", "Hello"]


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=30))
def test_a_text_that_fits_is_never_refused(nfc: TextTokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = nfc.encode(text)
    assert encode_prompt(nfc, text, len(ids)) == ids


def test_a_text_too_long_is_refused_without_being_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = changed(tmp_path)
    fits = "<|endoftext|>" * 10
    assert len(encode_prompt(tokenizer, fits, 10)) == 10
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("encoded"))
    with pytest.raises(ApiError, match=r"context is 10 tokens; the prompt has 131 bytes") as refusal:
        encode_prompt(tokenizer, fits + "x", 10)
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")


def test_half_a_surrogate_pair_is_a_400(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"U\+D83D at character 2") as refusal:
        encode_prompt(changed(tmp_path), "ab\ud83d", 100)
    assert refusal.value.status == 400


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = changed(tmp_path)
    work = threading.Thread(target=tokenizer.encode, args=("a" * 1_000_000,))
    work.start()
    turns = 0
    while work.is_alive():
        time.sleep(0.002)
        turns += 1
    assert turns > 10


def test_workers_keep_to_their_limit_and_outlive_a_caller_who_leaves() -> None:
    async def scene() -> list[Any]:
        workers, gate, seen = Workers(2), threading.Event(), []

        def job(number: int) -> int:
            seen.append(number)
            assert gate.wait(10)
            if number == 2:
                raise ValueError("two")
            return number

        tasks = [asyncio.create_task(workers.run(job, number)) for number in range(4)]
        while len(seen) < 2:
            await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert (sorted(seen), workers.running) == ([0, 1], 2)
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert workers.running == 0
        return results

    cancelled, one, two, three = asyncio.run(scene())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (one, str(two), three) == (1, "two", 3)


def test_no_more_requests_wait_for_a_worker_than_could_be_answered() -> None:
    async def scene() -> None:
        workers, gate = Workers(2), threading.Event()
        service = Service(
            SimpleNamespace(tokenizer=SimpleNamespace(generation=GenerationDefaults())), Hub(1, 99), None, workers
        )  # type: ignore[arg-type]
        tasks = [asyncio.create_task(service.prepare(gate.wait, 10)) for _ in range(2 + 100)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="100 requests wait") as fault:
            await service.prepare(gate.wait, 10)
        assert (fault.value.status, fault.value.headers) == (429, {"Retry-After": "1"})
        tasks[50].cancel()
        await asyncio.sleep(0)
        assert workers.waiting == 99, "one that left waits no more"
        gate.set()
        assert await service.prepare(gate.wait, 10)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (workers.waiting, workers.running) == (0, 0)

    asyncio.run(scene())


def test_a_server_in_the_middle_of_a_long_text_answers_others_and_stops_at_once(
    start_server: Start, tmp_path: Path
) -> None:
    arguments = setup(tmp_path, {"blocks": [[1]]}, size=1)
    tokenizer = tmp_path / "ranks" / "rank-0-of-1" / "tokenizer.json"
    document = json.loads(tokenizer.read_text())
    document["normalizer"] = {"type": "Sequence", "normalizers": [NFC]}  # no bound: the text will be encoded
    tokenizer.write_text(json.dumps(document))
    server = start_server(*arguments)
    pids = [server.pid, *server.rank_pids()]
    ended: list[str] = []

    def ask() -> None:
        with server.client(60) as client:
            try:
                ended.append(str(client.post("/v1/completions", json={"prompt": "a" * 30_000_000}).status_code))
            except Exception as error:
                ended.append(type(error).__name__)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.5)
    with server.client() as client:
        start = time.monotonic()
        assert client.get("/health/live").status_code == 200
        assert time.monotonic() - start < 1
    assert asking.is_alive()
    server.process.terminate()
    assert server.wait_exit(5) == 0
    wait_gone(pids, 2)
    asking.join(10)
    assert ended and ended[0] != "200"
