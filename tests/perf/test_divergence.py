"""The divergence that `eval --against` prints: its formula, and that it is taken from the engine's own predictions."""

from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.perf.divergence import Predictor, divergence
from duovolt.perf.whole_model import whole_model
from duovolt.runtime.engine.loading import EngineSettings, load_engine
from duovolt.runtime.messages import GenerateRequest, SamplingParams
from duovolt.runtime.parallel.base import SoloCollective
from duovolt.shard.split import shard

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny_qwen3_5" / "checkpoint"
WINDOWS = [[5, 9, 2, 77, 31, 8, 100, 3, 64, 12, 90], [1, 2, 3, 250, 17]]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kl") / "converted"
    convert(FIXTURE, target, load_recipe("v100-nvfp4"), 2, lambda count: None)
    return target


def test_the_formula(quantised: Path) -> None:
    reference, measured = Predictor(FIXTURE, 16), Predictor(quantised, 16)
    found = divergence(reference, measured, WINDOWS, lambda count: None)
    nats, same = [], []
    for window in WINDOWS:
        p, q = (np.exp(predictor.log_probabilities(window).numpy()) for predictor in (reference, measured))
        assert p.shape == (len(window), 256) and np.allclose(p.sum(axis=1), 1)
        nats += [
            sum(a * (np.log(a) - np.log(b)) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)
        ]
        same += list(p.argmax(axis=1) == q.argmax(axis=1))
    assert found.mean == pytest.approx(np.mean(nats), rel=1e-9) and found.largest == pytest.approx(max(nats), rel=1e-9)
    assert found.tokens == 16 and found.agreement == np.mean(same)
    assert 0 < found.mean < found.largest


def test_a_model_does_not_diverge_from_itself(quantised: Path) -> None:
    for directory in (FIXTURE, quantised):
        found = divergence(Predictor(directory, 16), Predictor(directory, 16), WINDOWS, lambda count: None)
        assert (found.mean, found.largest, found.agreement) == (0, 0, 1)


def test_predictions_are_those_that_a_server_scores_with(quantised: Path) -> None:
    engine = load_engine(quantised, SoloCollective(), EngineSettings(max_context=32))
    window = WINDOWS[0]
    engine.add(
        GenerateRequest(1, window, 0, [], False, SamplingParams(temperature=0.0, logprobs=1), echo_logprobs=True)
    )
    scored = []
    while engine.has_work():
        scored += [entry.logprob for event in engine.step()[1] for entry in event.prompt_logprobs]
    ours = Predictor(quantised, 16).log_probabilities(window)
    assert [float(ours[i, token]) for i, token in enumerate(window[1:])] == pytest.approx(scored, abs=1e-5)


def test_models_of_different_vocabularies_are_not_compared(quantised: Path) -> None:
    other = Path(__file__).parents[2] / "tiny" / "checkpoint"
    with pytest.raises(InputError, match="two models"):
        divergence(Predictor(other, 16), Predictor(quantised, 16), WINDOWS, lambda count: None)


def test_no_reference_no_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(FIXTURE), "--against", str(tmp_path / "none")]) == 2
    assert "not a directory" in capsys.readouterr().err


def test_one_rank_of_several_is_no_reference(quantised: Path, tmp_path: Path) -> None:
    shard(quantised, tmp_path / "ranks", 2)
    with pytest.raises(InputError, match="one of 2 ranks"):
        Predictor(tmp_path / "ranks" / "rank-0-of-2", 16)


def test_a_folder_of_ranks_is_a_model(quantised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `serve` takes it; of several ranks none predicts alone, which is said with what to do."""
    shard(quantised, tmp_path / "one", 1)
    shard(quantised, tmp_path / "two", 2)
    assert whole_model(tmp_path / "one") == tmp_path / "one" / "rank-0-of-1"
    assert whole_model(quantised) == quantised
    assert main(["eval", str(tmp_path / "two")]) == 2
    assert "2 ranks" in (said := capsys.readouterr().err) and "--url" in said and "tokenizer" not in said
    assert main(["eval", str(quantised), "--against", str(tmp_path / "two")]) == 2
    assert "2 ranks" in capsys.readouterr().err
