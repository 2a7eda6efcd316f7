"""Two ranks on two cards, or both on the only one: the choice of a way, links broken on purpose, and answers.

A way or a server takes 10 to 25 s on two cards, longer on one, at which the ranks take turns.
Where minutes count, name the tests in the order that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.runtime.parallel.choice import choose
from duovolt.runtime.parallel.faults import LINK_DOOR

from .conftest import Server, running

START_SECONDS = 100.0  # cards are looked at, ways tried, kernels loaded, or built where they were not before
Start = Callable[..., Server]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a card for every rank")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
ONE = torch.cuda.device_count() == 1
NAMES = ["0", "0"] if ONE else ["0", "1"]
CARDS = ("--backend", "cuda", "--devices", ",".join(NAMES), "--max-context", "4096", "--lanes", "4")


@pytest.fixture(scope="module")
def two(tiny: Path) -> Iterator[Server]:
    yield from running(tiny / "ranks-2", *CARDS, seconds=START_SECONDS)


def started(start_server: Start, *arguments: str | Path, **environment: str) -> Server:
    return start_server(*arguments, ready=False, **environment).wait_ready(START_SECONDS)


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.client(90) as client:
        reply = client.post(path, json={"temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, f"{reply.text}\n{server.log}"
    return reply.json()


def text(server: Server, prompt: str | list[int], tokens: int) -> str:
    return ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": tokens})["choices"][0]["text"]


@pytest.mark.parametrize("wish", ["auto", "host", "ipc", pytest.param("nccl", marks=needs_two)])
def test_every_way_is_right_eagerly_and_in_replays(wish: str) -> None:
    """Exact integers and any floats, all sizes, both directions: `choose` refuses what gives one wrong bit."""
    made = choose(wish, NAMES)  # type: ignore[arg-type]
    print(f"\n{made}")
    assert {verdict.transport: verdict.fault for verdict in made.found}[made.small] is None
    assert made.small == wish or wish == "auto"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ipc=0:400:drop", "no answer from rank 0 at step 400"),
        ("ipc=1:2200:stale", "no answer from rank 1 at step 2200"),  # in a replay
        ("ipc=1:400:4000", "no answer from rank 1 at step 400"),
    ],
)
def test_a_broken_link_ends_in_the_slower_path(monkeypatch: pytest.MonkeyPatch, fault: str, words: str) -> None:
    """R01 R02 R03: whichever direction it is; NCCL is kept from the link too."""
    monkeypatch.setenv(LINK_DOOR, fault)
    made = choose("auto", NAMES)
    print(f"\n{made}")
    assert made.small in ("host", "nccl") and not made.peer_memory
    assert words in str(made)


def test_two_cards_give_the_reference_s_answer(two: Server, tiny: Path, start_server: Start) -> None:
    reference = start_server(tiny / "ranks-1", "--backend", "reference", "--max-context", "512", "--drafts", "0")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24}
    found, wanted = (ask(server, "/v1/chat/completions", body) for server in (two, reference))
    assert found["choices"][0]["message"] == wanted["choices"][0]["message"]
    assert found["usage"]["completion_tokens"] == 24 and found["duovolt"]["drafts_proposed"] > 0
    assert "collective=ipc" in two.log or "collective=host" in two.log


def test_the_official_client(two: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", timeout=120, max_retries=0)
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Once upon a time"}]
    whole = client.chat.completions.create(model=model, messages=question, max_tokens=40, temperature=0)
    chunks = client.chat.completions.create(
        model=model,
        messages=question,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(chunks)
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == (whole.choices[0].message.content or "") and parts[-1].usage == whole.usage


def test_the_same_answer_again_and_beside_others(two: Server) -> None:
    """R11: four lanes at once and one alone: the same bits."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: text(two, "Go on" if number % 2 else f"And {number}", 200), range(8)))
    assert set(found[1::2]) == {text(two, "Go on", 200)}


def test_long_prompts_and_kept_prefixes(two: Server) -> None:
    """Chunks of a prompt take the way for large sums; what is kept of it is found, and changes no token."""
    prompt = [1 + number * number % 2999 for number in range(3000)]
    body = {"prompt": prompt, "max_tokens": 40}
    first, again = (ask(two, "/v1/completions", body) for _ in range(2))
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 2900


def test_a_server_goes_the_slower_way_where_the_link_is_broken(tiny: Path, start_server: Start, two: Server) -> None:
    server = started(start_server, tiny / "ranks-2", *CARDS, **{LINK_DOOR: "ipc=0:300:drop"})
    assert "ipc not used" in server.log and "collective=host" in server.log
    assert text(server, "Hello", 100) == text(two, "Hello", 100)


@pytest.mark.parametrize("way", ["host", pytest.param("nccl", marks=needs_two)])
def test_the_other_ways_serve_too(tiny: Path, start_server: Start, two: Server, way: str) -> None:
    """The same bits whatever the way, so the same text."""
    server = started(start_server, tiny / "ranks-2", *CARDS, "--collective", way)
    assert f"collective={way}" in server.log
    assert text(server, "Once upon a time", 100) == text(two, "Once upon a time", 100)


def test_one_card_and_two_score_a_text_alike(tiny: Path, start_server: Start, two: Server) -> None:
    """R11: sums in another order, so other last digits, and no more."""
    one = started(start_server, tiny / "ranks-1", "--backend", "cuda", "--max-context", "4096")
    body = {
        "prompt": "Once upon a time there was a small house by the sea.",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }
    scores = [ask(server, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"] for server in (one, two)]
    apart = [abs(a - b) for a, b in zip(*(row[1:] for row in scores), strict=True)]
    print(f"\nlog probabilities apart by {max(apart):.1e} at most, of {len(apart)}")
    assert len(apart) > 10 and max(apart) < 0.05


@pytest.mark.parametrize("switch", ["--head-split=on", "--attention=plain"])
def test_the_plain_forms_give_the_same_text(tiny: Path, start_server: Start, switch: str) -> None:
    """Candidates over the link, in captured rounds: greedy, drawn from a few, and drawn from all. Attention's plain kernel:
    greedy alone, since it rounds otherwise. A server after the other, of few shapes: one card may have to do for both.
    """
    drawn = ({"temperature": 0.8, "top_k": 20, "seed": 5}, {"temperature": 0.8, "seed": 5})
    few = ("--backend", "cuda", "--devices", ",".join(NAMES), "--max-context", "512", "--drafts", "1")
    texts: list[list[str]] = []
    for words in ((switch,), ()):
        server = started(start_server, tiny / "ranks-2", *few, *words)
        fact = (switch if words else switch.replace("=on", "=off").replace("=plain", "=split"))[2:].replace("-", "_")
        assert f" {fact} " in server.log and " graphs=on " in server.log
        bodies = [{"prompt": "Once upon a time", "max_tokens": 40} | wishes for wishes in ({}, *drawn)]
        asked = bodies[:1] if "attention" in switch else bodies
        texts.append([ask(server, "/v1/completions", body)["choices"][0]["text"] for body in asked])
        server.kill()
    assert texts[0] == texts[1] and all(len(text) > 20 for text in texts[0])
