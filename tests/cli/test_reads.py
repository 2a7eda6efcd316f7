"""Nothing that somebody states is ignored in silence: each option has a declared reader, or its run is refused."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.cli import numbers
from duovolt.cli.main import COMMANDS, _parser, main
from duovolt.cli.parser import Parser, tasks_of
from duovolt.runtime.proxy.options import ServeOptions

OF_MAIN = {"quiet", "debug", "help"}


def leaves() -> Iterator[tuple[str, Parser]]:
    """Every command, and every task of one, with its parser."""
    for command in COMMANDS:
        parser, _ = _parser(command)
        assert isinstance(parser, Parser)
        _, tasks = tasks_of(parser)
        yield from ((f"{command} {name}", task) for name, task in tasks.items()) if tasks else [(command, parser)]


LEAVES = dict(leaves())


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest not in OF_MAIN]


def test_the_walk_sees_every_command_and_task() -> None:
    assert {name.split()[0] for name in LEAVES} == set(COMMANDS)
    assert set(importlib.import_module("duovolt.cli.bench").TASKS) == {n.split()[1] for n in LEAVES if " " in n}


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_has_a_reader_and_every_reader_an_option(name: str) -> None:
    parser = LEAVES[name]
    assert parser.reads is not None, "a command declares READS beside its options"
    assert parser.reads.names == {action.dest for action in options_of(parser)}


@pytest.mark.parametrize("name", LEAVES)
def test_every_condition_can_be_judged_by_what_a_parser_gives(name: str) -> None:
    """With all at their defaults, each option is read or not: no condition asks for an argument that is not there."""
    parser = LEAVES[name]
    args = argparse.Namespace(**{action.dest: action.default for action in options_of(parser)})
    if parser.reads.layered:
        args = argparse.Namespace(
            **vars(importlib.import_module("duovolt.runtime.proxy.options").ServeOptions("ranks"))
        )
    refused = []
    for option in parser.reads.names:
        try:
            parser.reads.refuse_unread(args, [option], {})
        except InputError:
            refused.append(option)
    assert len(refused) < len(parser.reads.names), "with no option at all, some options would be read"


@pytest.mark.parametrize("name", LEAVES)
def test_every_number_is_read_in_one_place(name: str) -> None:
    for action in options_of(LEAVES[name]):
        assert action.type not in (int, float), f"{action.dest}: cli/numbers.py reads numbers"
        if action.type is not None and isinstance(action.default, str) and action.default is not argparse.SUPPRESS:
            assert action.type(action.default) == action.default, "a default is what the option would have given"


NOT_MEANT = [
    "٣",
    "1_0",
    "1e1",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "9" * 21,
    "0x10",
    "1,0",
    "3.5",
    "",
    " ",
    "１２",
    "½",
]


def takes_whole(action: argparse.Action) -> bool:
    return getattr(action.type, "__module__", "") == numbers.__name__ and getattr(
        action.type, "__qualname__", ""
    ).split(".")[0] in ("whole", "whole_from", "positions")


@pytest.mark.parametrize("name", LEAVES)
def test_a_whole_number_is_written_in_plain_digits(name: str) -> None:
    for action in filter(takes_whole, options_of(LEAVES[name])):
        for text in NOT_MEANT:
            with pytest.raises(argparse.ArgumentTypeError):
                action.type(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "infinity", "1e999", "1_0.5", "٣.٥", "1.5 ", "0x1p3", "", "."])
def test_a_decimal_is_a_finite_number_in_plain_digits(text: str) -> None:
    for parse in (numbers.decimal, numbers.decimal_from(0), numbers.seconds(zero=True)):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    assert [numbers.decimal(good) for good in ("1.5", "1e3", "-2", ".5", "3.")] == [1.5, 1000.0, -2.0, 0.5, 3.0]


IGNORED = [
    ("predict --study --card h200", "--card"),
    ("predict qwen3.8-27b --card v100-877 --acceptance 0.5", "--acceptance"),
    ("predict x.gguf --card v100-877 --graphs serial", "--graphs"),
    ("predict qwen3.8-27b --card v100-877 --json --what-if --drafts 1", "--what-if"),
    ("predict qwen3.8-27b --card v100-877 --tp 1 --link nvlink", "--link"),
    ("predict qwen3.8-27b --card v100-877 --tp 1 --head whole", "--head"),
    ("predict --check m.json --against f.json --drafts 1", "--drafts"),
    ("bench serve --overhead --lanes 2", "--lanes"),
    ("bench serve --report run.jsonl --tokens 3", "--tokens"),
    ("bench serve --url http://127.0.0.1:9 --rate 5", "--rate"),
    ("bench curve --read c.json --steps 3", "--steps"),
    ("bench collective --alone --ways ipc", "--ways"),
    ("bench collective --lockstep --alone", "--alone"),
    ("bench engine --dir somewhere --recipe bf16", "--recipe"),
    ("bench engine --devices cpu --arch compute_70", "--arch"),
    ("bench engine --devices 0 --collective nccl", "--collective"),
    ("bench engine --devices 0,1 --tp 1", "--tp"),
    ("bench engine --head-split on", "--head-split"),
    ("bench launches --card-file a.json --drafts 2", "--drafts"),
    ("bench launches qwen3.8-27b --devices 0,1 --tp 1", "--tp"),
    ("bench launches qwen3.8-27b --collective host", "--collective"),
    ("bench pipeline --gigabytes 1", "--gigabytes"),
    ("bench pipeline --quantisers --rounds 2", "--rounds"),
    ("bench pipeline --full --work w --apart a", "--apart"),
    ("bench kernels --route wide", "--route"),
    ("kernels tune --arch sm_70", "--arch"),
    ("kernels report --out somewhere", "--out"),
    ("eval d --top 3", "--top"),
    ("eval d --out o.json", "--out"),
    ("eval --url http://127.0.0.1:9 --words w", "--words"),
    ("eval --url http://127.0.0.1:9 --what text --contexts 4096", "--contexts"),
    ("eval --url http://127.0.0.1:9 --what graded --window 5", "--window"),
    ("eval --compare a b --text t", "--text"),
    ("eval d --arithmetic --prompts 3", "--prompts"),
    ("eval --arithmetic --random qwen3.8-27b --text t", "--text"),
    ("eval d --arithmetic --seed 1", "--seed"),
    ("compare d --a reference --b reference --kv fp16", "--kv"),
    ("compare d --b reference --devices 0", "--devices"),
    ("compare d --text t --seed 3", "--seed"),
    ("compare d --arch-a compute_70", "--arch-a"),
    ("verify --converted c --mtp-from m", "--mtp-from"),
    ("verify --converted c --recipe v100", "--recipe"),
    ("verify --converted c --repair --endpoint http://127.0.0.1:9", "--endpoint"),
    ("verify --converted c --quarantine", "--quarantine"),
    ("synth d --config tiny --recipe bf16", "--recipe"),
    ("synth d --config tiny --fill sparse --seed 3", "--seed"),
    ("selftest --read r --quick", "--quick"),
    ("ledger m.gguf --tp 1", "--tp"),
    ("serve r --backend reference --kv fp16", "--kv"),
    ("serve r --backend reference --devices 0", "--devices"),
    ("serve r --devices cpu --collective nccl", "--collective"),
    ("serve r --devices cpu --graphs serial", "--graphs"),
    ("serve r --devices cpu --plain-weights 4G", "--plain-weights"),
    ("serve r --backend reference --plain-weights 4G", "--plain-weights"),
    ("bench engine --devices cpu --plain-weights 4G", "--plain-weights"),
    ("serve r --drafts 0 --draft-head on", "--draft-head"),
    ("serve r --backend scripted:s --drafts 2", "--drafts"),
    ("serve r --backend scripted:s --drafts-from d", "--drafts-from"),
    ("serve r --backend scripted:s --draft-head on", "--draft-head"),
    ("serve r --backend scripted:s --prefill-chunk 64", "--prefill-chunk"),
    ("serve r --backend scripted:s --prefix-cache 1G", "--prefix-cache"),
    ("serve r --backend scripted:s --prefix-interval 64", "--prefix-interval"),
    ("serve r --drafts 0 --draft-window 512", "--draft-window"),
    ("bench engine --drafts 0 --draft-window 512", "--draft-window"),
    ("predict qwen3.8-27b --card v100-877 --acceptance 0.7 --drafts 0", "--acceptance"),
    ("serve r --prefix-cache off --prefix-interval 64", "--prefix-interval"),
    ("serve r --max-waiting 0 --max-wait-seconds 3", "--max-wait-seconds"),
    ("serve r --log-content", "--log-content"),
]


@pytest.mark.parametrize(("words", "option"), IGNORED, ids=[words for words, _ in IGNORED])
def test_what_would_be_ignored_is_refused(
    words: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a command that is not refused writes here
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"duovolt: {option} has no effect here: ") and said.count("\n") == 1, said


ASKS_FOR_NOTHING = [
    "serve r --no-log-content",
    "serve r --drafts 0 --draft-head off",
    "serve r --drafts 0 --draft-head auto --draft-window 0",
    "serve r --devices cpu --backend cuda --collective auto",
    "serve r --devices cpu --plain-weights auto",
    "serve r --backend reference --plain-weights off",
    "serve r --backend reference --kv int8 --graphs off",
    "serve r --backend scripted:s --drafts 0 --prefix-cache off",
    "serve r --prefix-cache off --prefix-interval 8192",
    "bench engine --drafts 0 --draft-window 0",
    "bench engine --dir r --tp 1",
    "bench engine --head-split off --collective auto",
    "ledger tiny --drafts 0 --draft-head 0",
    "predict tiny --card h200 --tp 1 --link none --head split",
    "predict tiny --card h200 --drafts 0 --draft-head 0",
    "bench launches --card-file a.json --lanes 1 --drafts 0",
]


@pytest.mark.parametrize("words", ASKS_FOR_NOTHING)
def test_what_asks_for_nothing_may_stand_anywhere(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else such a run lacks: here most name folders that are not there."""
    command, *rest = words.split()
    parser, module = _parser(command)
    args = parser.parse(rest)
    if command == "serve":
        module.options_of(args)
    if command in ("ledger", "predict"):
        assert module.run(args) == 0
    assert capsys.readouterr().err == ""


def test_a_message_names_only_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "tiny", "--draft-head", "1000"]) == 2
    assert "--draft-head has no effect here: it is read only with --drafts. " in capsys.readouterr().err
    assert main(["ledger", "m.gguf", "--draft-head", "1000"]) == 2
    assert "which a .gguf is not and with --drafts. " in capsys.readouterr().err


def test_one_rank_of_a_directory_has_nothing_to_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in ("1", "2"):
        words = ["--config", "tiny", "--layers", "4", "--stage", "ranks", "--tp", ranks, "--quiet"]
        assert main(["synth", str(tmp_path / ranks), *words]) == 0
    for option in (["--head-split", "on"], ["--collective-us", "5"]):
        devices = ["--devices", "cpu"] if option[0] == "--head-split" else ["--devices", "0"]
        assert main(["bench", "engine", "--dir", str(tmp_path / "1"), *devices, *option]) == 2
        assert f"{option[0]} has no effect here: {tmp_path / '1'} is one rank" in capsys.readouterr().err
        parser, _ = _parser("bench")
        args = parser.parse(["engine", "--dir", str(tmp_path / "2"), *devices, *option])
        importlib.import_module("duovolt.cli.bench_engine")._check(args)


LOWER = [
    ("draft-window = 4096", "draft_window", "--drafts 0", "it is read only with --drafts."),
    ("draft-head = 'on'", "draft_head", "--drafts 0", "it is read only with --drafts."),
    ("prefix-interval = 4096", "prefix_interval", "--prefix-cache off", "it is read only with --prefix-cache."),
    ("kv = 'fp16'", "kv", "--backend reference", "it is read only by the cuda backend."),
    ("log-content = true", "log_content", "", "it is read only with --log-requests."),
]


@pytest.mark.parametrize(("file", "field", "words", "said"), LOWER, ids=[field for _, field, _, _ in LOWER])
def test_what_a_file_says_and_this_run_does_not_read_is_left_out_with_a_line(
    file: str, field: str, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(file)
    parser, module = _parser("serve")
    given = ["r", "--config", str(tmp_path / "c.toml"), *words.split()]
    options = module.options_of(parser.parse(given))
    assert getattr(options, field) == getattr(ServeOptions(Path("r")), field)
    place = f"{tmp_path / 'c.toml'}: {field.replace('_', '-')}"
    assert capsys.readouterr().err == f"duovolt serve: {place} has no effect here: {said}\n"
    module.options_of(parser.parse([*given, "--quiet"]))
    assert capsys.readouterr().err == ""


def test_so_is_what_a_variable_says_unless_the_command_line_says_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUOVOLT_COLLECTIVE", "nccl")
    monkeypatch.setenv("DUOVOLT_LOG_CONTENT", "no")
    parser, module = _parser("serve")
    assert module.options_of(parser.parse(["r", "--devices", "cpu"])).collective == "auto"
    assert (
        capsys.readouterr().err == "duovolt serve: DUOVOLT_COLLECTIVE has no effect here: it is read only on cards.\n"
    )
    assert main(["serve", "r", "--devices", "cpu", "--collective", "host"]) == 2
    assert "duovolt: --collective has no effect here" in capsys.readouterr().err
