"""Commands that need a card: what is wrong in the given words and paths is told before that there is no card."""

from pathlib import Path

import pytest
import torch

from duovolt.cli.main import main
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
GONE = "/no-such-place"
COMMANDS = [
    (f"eval {GONE} --arithmetic", f"{GONE}: not a directory"),
    (f"eval {TINY} --arithmetic --text {GONE}", f"{GONE}: a text"),
    (f"eval --arithmetic --random {GONE}", GONE),
    (f"eval {TINY} --arithmetic --context 999999", "--context 999999"),
    (f"compare {GONE} --b cuda --devices 0", GONE),
    (f"compare {TINY} --b cuda --devices 0 --text {GONE}", f"{GONE}: a prompt"),
    (f"bench engine --dir {GONE}", GONE),
    (f"bench engine --dir {GONE} --devices 0,1", GONE),
    (f"bench engine --dir {TINY} --devices 0,1", "1 rank for 2 cards"),
    (f"bench engine --config {GONE}", GONE),
    (f"bench engine --recipe {GONE}.toml", f"{GONE}.toml"),
    (f"bench engine --json {GONE}/x.json", f"there is no directory {GONE}"),
    ("bench engine --arch volta", "architecture 'volta'"),
    (f"bench serve --url http://127.0.0.1:1 --out {GONE}/x", f"--out {GONE}/x: there is no directory"),
    (f"bench launches {GONE}", GONE),
    (f"bench launches {GONE} --devices 0,1", GONE),
    (f"bench curve --svg {GONE}/x.svg", f"--svg {GONE}/x.svg: there is no directory"),
    (f"bench curve --read {GONE}", GONE),
    ("bench curve --arch volta", "architecture 'volta'"),
    ("bench kernels --only nothing", "case 'nothing' is unknown"),
    ("bench kernels --route wide", "--route has no effect here: it is read only with --prefill."),
    (
        "bench kernels --prefill 64 --tokens 1",
        "--tokens has no effect here: it is read only without --family or --prefill.",
    ),
    ("bench kernels --family delta --prefill 64", "--prefill has no effect here: it is read only without --family."),
    (f"convert {GONE} {GONE}-out --device cuda", GONE),
    (f"convert {TINY} {GONE}-out --device cuda --recipe {GONE}.toml", f"{GONE}.toml"),
    (f"doctor --folder {GONE}", GONE),
    (f"selftest --out {GONE}/x", f"{GONE}/x"),
    (f"selftest --read {GONE}", GONE),
]


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(("words", "told"), COMMANDS, ids=[words[:60] for words, _ in COMMANDS])
def test_bad_input_is_told_before_a_missing_card(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert told in said and "card for" not in said and "no CUDA device" not in said, said


def test_then_the_missing_card_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same commands with nothing wrong in them: the cases above pass for their reason."""
    convert(TINY, tmp_path / "converted", load_recipe("v100"), 1, lambda count: None)
    for words in (
        f"eval {tmp_path}/converted --arithmetic",
        f"bench engine --dir {tmp_path}/converted",
        "bench engine --config tiny --devices 0,1",
        "bench launches tiny",
        "bench launches tiny --devices 0,1",
        f"bench curve --svg {tmp_path}/x.svg",
        "bench kernels --tokens 1 --ablate",
        "bench kernels --prefill 64 --route wide",
    ):
        assert main(words.split()) == 3, words
        said = capsys.readouterr().err
        assert "card" in said or "no CUDA device" in said, said


@pytest.mark.parametrize("more", ["", " --stages", " --full"])
def test_a_place_that_cannot_be_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured first")

    for name in ("race_quantisers", "race_stages", "run_full_size"):
        monkeypatch.setattr(f"duovolt.cli.bench_pipeline.{name}", measured)
    (tmp_path / "file").write_text("")
    for work, told in ((tmp_path, "exists"), (tmp_path / "file" / "work", f"nothing can be made in {tmp_path}/file")):
        assert main(f"bench pipeline --work {work}{more}".split()) == 2
        assert told in capsys.readouterr().err
