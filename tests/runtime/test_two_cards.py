"""Two ranks on two cards: the choice of a way, links that are broken on purpose, and answers. Skipped without two cards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.runtime.parallel.choice import choose
from duovolt.runtime.parallel.faults import LINK_DOOR
from duovolt.shard.split import shard

from .conftest import Server, running

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
Start = Callable[..., Server]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an exchange takes two cards"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards")
    convert(TINY, folder / "converted", load_recipe("v100"), 1, lambda count: None)
    for size in (1, 2):
        shard(folder / "converted", folder / f"ranks-{size}", size)
    return folder


@pytest.mark.parametrize("wish", ["auto", "host", "ipc", "nccl"])
def test_every_way_is_right_eagerly_and_in_replays(wish: str) -> None:
    """Exact integers and any floats, all sizes, both directions: `choose` refuses what gives one wrong bit."""
    made = choose(wish)  # type: ignore[arg-type]
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
    made = choose("auto")
    print(f"\n{made}")
    assert made.small in ("host", "nccl") and not made.peer_memory
    assert words in str(made)


@pytest.fixture(scope="module")
def two(ranks: Path) -> Iterator[Server]:
    yield from running(ranks / "ranks-2", "--backend", "cuda", "--devices", "0,1", "--max-context", "4096")


def answer(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return json.loads(reply.to_json())


def test_the_official_client_gets_the_reference_s_answer_from_two_cards(
    two: Server, ranks: Path, start_server: Start
) -> None:
    reference = start_server(ranks / "ranks-1", "--backend", "reference", "--max-context", "512", "--drafts", "0")
    found, wanted = (answer(server, "Hello", 24) for server in (two, reference))
    assert found["choices"][0]["message"]["content"] == wanted["choices"][0]["message"]["content"]
    assert found["usage"]["completion_tokens"] == 24
    assert "collective=ipc" in two.log or "collective=host" in two.log


def test_the_same_answer_twice_and_beside_others(two: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = [
            reply["choices"][0]["message"]["content"] for reply in pool.map(lambda _: answer(two, "Go", 200), range(4))
        ]
    assert len(set(found)) == 1


def test_a_server_goes_the_slower_way_where_the_link_is_broken(ranks: Path, start_server: Start) -> None:
    server = start_server(
        *(ranks / "ranks-2", "--backend", "cuda", "--devices", "0,1", "--max-context", "512"), ready=False,
        **{LINK_DOOR: "ipc=0:300:drop"},
    )  # fmt: skip
    server.wait_log(r"ready on (https?://\S+)", seconds=90)
    server.wait_ready()
    assert "ipc not used" in server.log and "collective=host" in server.log
    assert answer(server, "Hello", 8)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("way", ["host", "nccl"])
def test_the_other_ways_serve_too(ranks: Path, start_server: Start, two: Server, way: str) -> None:
    """The same bits whatever the way, so the same text."""
    server = start_server(
        *(ranks / "ranks-2", "--backend", "cuda", "--devices", "0,1", "--max-context", "512", "--collective", way),
        ready=False,
    )
    server.wait_log(r"ready on (https?://\S+)", seconds=90)
    server.wait_ready()
    texts = [answer(one, "Once upon a time", 100)["choices"][0]["message"]["content"] for one in (server, two)]
    assert texts[0] == texts[1]
