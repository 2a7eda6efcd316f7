"""`--draft-head` on two reference ranks: the same answers with the reduced head as with the full one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from duovolt.cli.main import main

from .conftest import Server

BODY: dict[str, Any] = {"prompt": "The len function", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a draft head of half its vocabulary, over two ranks."""
    folder = tmp_path_factory.mktemp("draft-head")
    package = Path(str(resources.files("duovolt")))
    recipe = (package / "convert" / "recipes" / "v100.toml").read_text()
    (folder / "r.toml").write_text(f"draft_head = 1536\n{recipe}")
    source, converted, ranks = package / "tiny" / "checkpoint", folder / "converted", folder / "ranks"
    assert main(["convert", str(source), str(converted), "--recipe", str(folder / "r.toml"), "--quiet"]) == 0
    assert main(["shard", str(converted), str(ranks), "--tp", "2", "--quiet"]) == 0
    return ranks


def test_answers_do_not_depend_on_the_draft_head(start_server: Callable[..., Server], ranks: Path) -> None:
    texts = []
    for choice, says in (("auto", "1536-rows"), ("off", "full")):
        server = start_server(ranks, "--max-context", "128", "--draft-head", choice)
        assert f"draft_head={says}" in server.log
        with server.client(60) as client:
            texts.append(client.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
        assert server.metric("accepted_total") > 0
        server.kill()
    assert texts[0] == texts[1] and len(texts[0]) > 20


def test_on_needs_a_draft_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synth = ["synth", str(tmp_path / "ranks"), "--config", "narrow", "--layers", "4", "--stage", "ranks", "--tp", "1"]
    assert main([*synth, "--quiet"]) == 0
    assert main(["serve", str(tmp_path / "ranks"), "--draft-head", "on"]) == 2
    assert "has no draft head" in capsys.readouterr().err
