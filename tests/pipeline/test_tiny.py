"""The bundled model through the whole product: the demo, its quality, and speculation that changes no token."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.perf.quality import documents, known_words
from duovolt.runtime.engine.loading import EngineSettings, load_engine
from duovolt.runtime.messages import GenerateRequest, SamplingParams
from duovolt.runtime.parallel.base import SoloCollective

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "tiny" / "checkpoint"


ELSEWHERE = {  # what a user's environment says of other servers and hubs
    "http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1",
    "DUOVOLT_CONFIG": "/nowhere/serve.toml", "DUOVOLT_API_KEY_FILE": "/nowhere/key", "DUOVOLT_PORT": "1",
}  # fmt: skip


def run(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "duovolt", *map(str, arguments)]
    environment = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny") / "converted"
    convert(TINY, target, load_recipe("v100"), 2, lambda count: None)
    return target


def test_demo_runs_every_stage_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = abandoned()
    result = run("demo", cwd=tmp_path, **ELSEWHERE)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    for stage in range(1, 7):
        assert f"[{stage}/6]" in text
    assert "every digest checked" in text and "proofs hold" in text and "acceptance" in text and "tok/s" in text
    assert "length" in text  # what len returns
    assert abandoned() <= before
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]
    assert not mine
    again = run("demo", cwd=tmp_path)  # finds everything there, checks it, and asks again
    assert again.returncode == 0 and again.stdout.count("already there") == 3, again.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_ended_takes_its_server_and_its_hub_along(tmp_path: Path, number: signal.Signals) -> None:
    places = {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "duovolt", "demo", "--dir", "demo"]
    for line in ("[2/6]", "ready on http"):  # the second runs on what the first has made
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | places
        )
        assert demo.stdout is not None
        while line not in (said := demo.stdout.readline()):
            assert said, line
        demo.send_signal(number)
        demo.communicate(timeout=30)
        assert demo.returncode in (128 + number, -number)
        assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"serve\0demo/ranks" in _read(p)]
        assert list((tmp_path / "temporary").glob("duovolt-*")) == []


def abandoned() -> set[Path]:
    """What servers that have ended left in shared memory; those of others on this machine may come and go meanwhile."""
    found = Path("/dev/shm").glob("duovolt-*")
    return {path for path in found if not Path("/proc", path.name.split("-")[1]).exists()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_quality_and_the_price_of_quantising(converted: Path, tmp_path: Path) -> None:
    arguments = ["--score-bytes", "16000", "--prompts", "4", "--against", TINY, "--json"]
    result = run("eval", TINY, converted, *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    source, quantised = json.loads(result.stdout).values()
    for found in (source, quantised):
        assert found["scored_bytes"] == 16000 and found["proposed"] > 100
        assert found["known_word_share"] > 0.9
        assert found["acceptance"] >= 0.5
    assert source["bits_per_byte"] < 1.25
    assert source["divergence"]["mean"] == 0 and source["perplexity"] < quantised["perplexity"]
    assert 0.01 < quantised["divergence"]["mean"] < 0.2 and quantised["divergence"]["agreement"] > 0.8
    assert 0 < quantised["bits_per_byte"] - source["bits_per_byte"] < 0.05 * source["bits_per_byte"]


@pytest.mark.timeout(600)  # 10,240 tokens: a minute and a half on an idle core, several on a busy one
def test_greedy_answers_do_not_depend_on_drafts(converted: Path) -> None:
    """Ten held-out prompts, 512 tokens each, with three drafts a round and with none: the same tokens."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = documents((ROOT / "tiny" / "heldout.txt").read_text())
    prompts = [tokenizer.encode(part).ids[:48] for part in text[:10]]
    assert len(prompts) == 10
    answers: dict[int, list[list[int]]] = {}
    rounds: dict[int, int] = {}
    for drafts in (0, 3):
        engine = load_engine(converted, SoloCollective(), EngineSettings(max_context=600, drafts=drafts, lanes=1))
        answers[drafts], rounds[drafts] = [], 0
        for prompt in prompts:
            engine.add(GenerateRequest(1, prompt, 512, [], True, SamplingParams(temperature=0.0)))
            tokens: list[int] = []
            while engine.has_work():
                _, events = engine.step()
                rounds[drafts] += 1
                for event in events:
                    assert not event.error
                    tokens += event.tokens
            answers[drafts].append(tokens)
    assert all(len(tokens) == 512 for tokens in answers[0])
    assert answers[0] == answers[3]
    assert rounds[3] < rounds[0] / 2  # and drafting is worth it


def test_known_words_leave_out_cut_words_and_names() -> None:
    assert known_words("tial the Model uses foo_bar and zzyzx wor", {"the", "uses", "and"}) == (3, 4)
