"""lm-eval's `local-completions` against a server of the bundled model: prompts in batches, scored by echo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Server
from .real_model import duovolt

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
TASK = Path(__file__).parent / "lm_eval"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not on the PATH")
def test_lm_eval_scores_through_the_completions_api(start_server: Callable[..., Server], tmp_path: Path) -> None:
    duovolt("convert", TINY, tmp_path / "converted", "--quiet")
    duovolt("shard", tmp_path / "converted", tmp_path / "ranks", "--tp", "2", "--quiet")
    server = start_server(tmp_path / "ranks", "--lanes", "4")
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={TINY},num_concurrent=2"
    subprocess.run(
        ["lm_eval", "run", "--model", "local-completions", "--model_args", model, "--batch_size", "4",
         "--tasks", "python_sentences", "--include_path", str(TASK), "--output_path", str(tmp_path), "--log_samples"],
        cwd=TASK, check=True, timeout=170, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["python_sentences"]["acc,none"] == 1.0
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    with server.client() as client:
        for sample in map(json.loads, samples.read_text().splitlines()):
            for number, choice in enumerate(sample["doc"]["choices"]):
                context = sample["doc"]["question"] + "\n\n"
                body = {"prompt": context + choice, "max_tokens": 0, "echo": True, "logprobs": 1}
                logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
                begin = logprobs["text_offset"].index(len(context.rstrip()))  # lm-eval counts white space to the choice
                found = float(sample["resps"][number][0][0])
                assert found == pytest.approx(sum(logprobs["token_logprobs"][begin:]), abs=1e-3)
    assert server.metric("running") == 0
