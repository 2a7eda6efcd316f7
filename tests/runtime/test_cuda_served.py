"""The CUDA backend behind the server, without a card: its code on the kernels' torch references; and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.damage import edit_tensor
from .conftest import Server, running

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 10,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": True,
}
Start = Callable[..., Server]


@pytest.fixture(scope="module")
def two(tiny: Path) -> Iterator[Server]:
    yield from running(
        tiny / "ranks-2", "--backend", "cuda", "--devices", "cpu", "--max-context", "512", "--kv", "fp16"
    )


def said(server: Server) -> tuple[list[Any], dict[str, Any]]:
    with server.client(90) as client:
        answer = client.post(CHAT, json=ASK).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == ASK["max_tokens"] and all(-30 < entry["logprob"] <= 0 for entry in entries)
    return [entry["bytes"] for entry in entries], answer


def test_two_ranks_give_the_answer_of_the_reference(start_server: Start, tiny: Path, two: Server) -> None:
    """From rank directories to HTTP; a trained model's greedy answer is the oracle's."""
    found, answer = said(two)
    assert answer["duovolt"]["drafts_proposed"] > 0
    reference = start_server(tiny / "ranks-1", "--backend", "reference", "--max-context", "512", "--drafts", "0")
    assert found == said(reference)[0]


def test_the_plan_is_told_before_loading_and_the_choices_when_ready(two: Server) -> None:
    """L05: the parts, then the log line with every choice."""
    log = two.log
    assert log.index("memory a rank") < log.index("together") < log.index("ready on")
    assert "fp16" in log and "16 pages of 64 tokens" not in log and "8 pages of 64 tokens" in log
    for fact in (
        "backend=cuda",
        "devices=cpu",
        "kv=fp16",
        "graphs=off",
        "collective=cpu",
        "weights=",
        "load=",
        "digests=",
    ):
        assert fact in log, fact


def test_a_damaged_rank_is_named_at_start(start_server: Start, tiny: Path, tmp_path: Path) -> None:
    """L07: the option of the engine is to load at all: digests are checked on the way."""
    import shutil

    broken = tmp_path / "ranks"
    shutil.copytree(tiny / "ranks-1", broken)
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    edit_tensor(broken / "rank-0-of-1", name, lambda data: data.__setitem__(7, data[7] ^ 16))
    server = start_server(broken, "--backend", "cuda", "--devices", "cpu", "--max-context", "64", ready=False)
    assert server.wait_exit(60) == 1
    assert f"tensor '{name}' has the digest" in server.log and "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--backend", "cuda"], 3, "no card for the CUDA engine"),
        (["--backend", "cuda", "--api-key-file", "/no-such-place"], 2, "--api-key-file /no-such-place: No such file"),
        (
            ["--backend", "reference", "--devices", "0"],
            2,
            "--devices has no effect here: it is read only by the cuda backend",
        ),
        (["--backend", "cuda", "--devices", "cpu", "--max-context", "99999"], 2, "the model's limit is 32768"),
        (["--devices", "0,x"], 2, "neither cpu nor numbers of cards"),
        (["--kv", "int4"], 2, "none of int8, fp16"),
        (["--max-context", "1"], 2, "not a whole number, at least 2"),
    ],
)
def test_what_cannot_be_had_is_refused_with_one_line(
    start_server: Start, tiny: Path, arguments: list[str], code: int, words: str
) -> None:
    """L01: nothing is read, nothing is started."""
    server = start_server(tiny / "ranks-1", *arguments, ready=False, CUDA_VISIBLE_DEVICES="")
    assert server.wait_exit(60) == code
    assert words in server.log and "Traceback" not in server.log and "loading" not in server.log
