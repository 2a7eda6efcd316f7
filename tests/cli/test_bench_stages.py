"""`bench pipeline --full` and `--stages`: a run of every stage, its ledger, and what is refused."""

from pathlib import Path

import pytest

from duovolt.cli.main import main
from duovolt.perf.fullsize import Step, run_full_size


def test_a_narrow_model_through_every_stage(tmp_path: Path) -> None:
    told: list[Step] = []
    found = run_full_size(tmp_path / "work", "narrow", 4, 2, 2, told.append)
    assert [step.what for step in told] == ["synth", "convert", "shard", "verify, ranks", "verify, all"]
    assert found.steps == told and all(step.peak_anonymous > 1 << 20 and step.seconds > 0 for step in told)
    assert told[3].nbytes == found.sizes["converted"] + found.sizes["ranks"]
    first, second = found.ledger
    assert first == second and sum(found.replicated.values()) == first["replicated"]
    assert 0 < found.sizes["ranks"] - 2 * sum(first.values()) < 1_000_000  # headers, manifests and side files
    assert found.sizes["converted"] - sum(first.values()) - first["column parallel"] - first["row parallel"] < 1_000_000
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("options", [["--stages"], ["--full"], ["--full", "--work", "here", "--tp", "0"]])
def test_refusals(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = [str(tmp_path / "here") if word == "here" else word for word in options]
    assert main(["bench", "pipeline", *work]) == 2
    assert "--work" in (said := capsys.readouterr().err) or "--tp 0" in said


def test_a_directory_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "duovolt.cli.bench_pipeline.race_quantisers", lambda *_: pytest.fail("it was looked at too late")
    )
    for mode in (["--stages"], ["--full"], []):
        assert main(["bench", "pipeline", *mode, "--work", str(tmp_path)]) == 2
        assert "exists" in capsys.readouterr().err
    assert tmp_path.is_dir()
