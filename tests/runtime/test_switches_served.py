"""Every switch to a plain form, through a real server: told in the line at start and by `/v1/models`, read from every layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server

SWITCHES = ("attention", "head_split", "draft_head", "draft_window", "collective", "graphs")
BODY: dict[str, Any] = {"prompt": "The len function", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ON_CPU = ("--backend", "cuda", "--devices", "cpu", "--max-context", "128")
Start = Callable[..., Server]


def told(server: Server) -> dict[str, str]:
    """What the line at start says of the switches, which `/v1/models` and the status say, too."""
    line = server.wait_log(r"ready on .*")[0]
    found = {name: re.search(rf" {name}=(\S+)", line)[1] for name in SWITCHES}  # type: ignore[index]
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["duovolt"]
        status = client.get("/status").json()["server"]
    assert {name: model[name] for name in SWITCHES} == {name: status[name] for name in SWITCHES} == found
    assert len(model["conversion_id"]) == 32 and f" conversion={model['conversion_id']} " in line
    assert model["recipe"] == "v100" and " recipe=v100 " in line
    return found


def text(server: Server, **wishes: Any) -> str:
    with server.client(90) as client:
        answer = client.post("/v1/completions", json=BODY | wishes).json()
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
    return str(answer["choices"][0]["text"])


def test_the_switches_change_no_answer_of_two_ranks(start_server: Start, tiny: Path, tmp_path: Path) -> None:
    """From the command line, the environment and a file; greedy, drawn from a few, and drawn from all."""
    config = tmp_path / "serve.toml"
    config.write_text('head-split = "on"\ndraft-window = 64\n')
    usual = start_server(tiny / "ranks-2", *ON_CPU)
    other = start_server(tiny / "ranks-2", *ON_CPU, "--config", config, "--graphs", "off", DUOVOLT_ATTENTION="plain")
    wanted = {"attention": "split", "head_split": "off", "draft_head": "full", "draft_window": "off"}
    assert told(usual) == wanted | {"collective": "cpu", "graphs": "off"}
    changed = {"attention": "plain", "head_split": "on", "draft_window": "64"}
    assert told(other) == wanted | changed | {"collective": "cpu", "graphs": "off"}
    for wishes in ({}, {"temperature": 0.8, "top_k": 20, "seed": 5}, {"temperature": 0.8, "seed": 5}):
        assert text(usual, **wishes) == text(other, **wishes)


def test_without_a_card_the_reference_is_plain_and_says_what_it_does_not_read(start_server: Start, tiny: Path) -> None:
    server = start_server(
        *(tiny / "ranks-2", "--max-context", "128", "--attention", "plain", "--head-split", "on"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert "--attention plain, --head-split on: for cards; the reference backend does not read it." in server.log
    plain = {"attention": "plain", "head_split": "off", "draft_head": "full", "draft_window": "off", "graphs": "off"}
    assert told(server) == plain | {"collective": "mailbox-cpu"}


def test_one_rank_has_nothing_to_split(start_server: Start, tiny: Path) -> None:
    for option in (("--head-split", "on"), ("--collective", "nccl")):
        server = start_server(tiny / "ranks-1", "--backend", "cuda", *option, ready=False)
        assert server.wait_exit(30) == 2
        assert f"{option[0]} has no effect here: " in server.log and "is one rank" in server.log
    server = start_server(tiny / "ranks-1", *ON_CPU)
    assert told(server)["head_split"] == "none"
    assert len(text(server)) > 10


@pytest.mark.parametrize("option", [("--attention", "fast"), ("--head-split", "auto")])
def test_other_words_are_refused(start_server: Start, tiny: Path, option: tuple[str, str]) -> None:
    server = start_server(tiny / "ranks-2", *option, ready=False)
    assert server.wait_exit(30) == 2
    assert f"'{option[1]}' is none of" in server.log and "Traceback" not in server.log
