"""What `duovolt serve` refuses before it starts anything: one message that names file and field, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main
from duovolt.perf.shapes import configuration
from duovolt.runtime.proxy.options import ServeOptions
from duovolt.runtime.proxy.plan import ServePlan, make_plan
from duovolt.runtime.proxy.sampling import SamplingDefaults
from duovolt.runtime.proxy.server import _tell_plan

from .stub_model import ids, make_ranks, write_script

CONFIG = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "tiny_qwen3_5" / "checkpoint" / "config.json").read_text()
)
CONFIG["text_config"]["vocab_size"] = 320
DEEP = b"[" * 200_000

Plan = Callable[..., ServePlan]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """The plan of a scripted server over one rank with the given files."""

    def make(files: dict[str, Any] | None = None, **options: Any) -> ServePlan:
        ranks = make_ranks(tmp_path / "ranks", 1)
        for name, content in (files or {}).items():
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (ranks / "rank-0-of-1" / name).write_bytes(raw)
        script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
        return make_plan(ServeOptions(ranks=ranks, backend=f"scripted:{script}", **options))

    return make


def refused(plan: Plan, files: dict[str, Any], **options: Any) -> str:
    with pytest.raises(InputError) as refusal:
        plan(files, **options)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


GENERATION: list[tuple[str, Any]] = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", True),
    ("temperature", [[0.5]]),
    ("top_k", 1.5),
    ("top_k", 2**70),
    ("top_k", -2),
    ("top_p", []),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", {}),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e300),
    ("eos_token_id", "x"),
    ("eos_token_id", {}),
    ("eos_token_id", [[1]]),
    ("eos_token_id", [1, None]),
    ("eos_token_id", -5),
    ("eos_token_id", 2**70),
    ("eos_token_id", [2**31]),
]


@pytest.mark.parametrize(("field", "value"), GENERATION)
def test_generation_config_is_held_to_the_bounds_of_requests(plan: Plan, field: str, value: Any) -> None:
    message = refused(plan, {"generation_config.json": {"top_k": 20, field: value}})
    assert f"generation_config.json: {field}" in message
    assert "Expected" in message or "out of range" in message


@pytest.mark.parametrize("raw", [b"[]", b"\xff", DEEP, b'{"a":' * 100_000, b"5", b"{"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json", "tokenizer.json"])
def test_files_that_are_no_json_object_are_named(plan: Plan, name: str, raw: bytes) -> None:
    assert f"{name}: " in refused(plan, {name: raw})


def test_a_sound_generation_config_gives_the_defaults(plan: Plan) -> None:
    content = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": None, "eos_token_id": [7, 8], "do_sample": "any"}
    tokenizer = plan({"generation_config.json": content}).tokenizer
    assert SamplingDefaults.of(tokenizer.generation) == SamplingDefaults(temperature=0.0, top_k=-1, top_p=1.0)
    assert tokenizer.stop_ids == sorted([7, 8, *ids("<|im_end|>")])
    one = plan({"generation_config.json": {"eos_token_id": 9}}).tokenizer
    assert one.stop_ids == sorted([9, *ids("<|im_end|>")])
    assert SamplingDefaults.of(one.generation) == SamplingDefaults()


def with_text(**changes: Any) -> dict[str, Any]:
    return CONFIG | {"text_config": CONFIG["text_config"] | changes}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIG | {"text_config": None}, "text_config: missing or not a JSON object"),
        (CONFIG | {"text_config": []}, "text_config: missing or not a JSON object"),
        (CONFIG | {"text_config": "x"}, "text_config: missing or not a JSON object"),
        (with_text(max_position_embeddings="x"), "max_position_embeddings is 'x'"),
        (with_text(max_position_embeddings=None), "max_position_embeddings is None"),
        (with_text(max_position_embeddings=10**30), "max_position_embeddings is 1000"),
        (with_text(mtp_num_hidden_layers=[]), "mtp_num_hidden_layers is []"),
        (with_text(vocab_size=100), "the tokenizer's largest id is 280, the model has 100 rows"),
    ],
)
def test_a_config_of_no_model_is_refused(plan: Plan, config: Any, words: str) -> None:
    assert words in refused(plan, {"config.json": config})


def test_the_context_follows_the_config(plan: Plan) -> None:
    assert plan({"config.json": with_text(max_position_embeddings=777)}).max_context == 777
    with pytest.raises(InputError, match=r"--max-context 778: the model's limit is 777"):
        plan({}, max_context=778)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (DEEP, "list"),
        (b"[[true]]", "Expected `int`, got `bool`"),
        (b"[[-1]]", ">= 0"),
        (b"[[99999999999999999999]]", "<= 2147483647"),
        (b"[[1, 281]]", "id 281 is not below 281"),
        (b"{}", "Expected `array`"),
        (b"\xff", "list"),
        (b"", "list"),
    ],
)
def test_drafts_from_must_hold_lists_of_ids(plan: Plan, tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "drafts").write_bytes(raw)
    message = refused(plan, {}, drafts_from=tmp_path / "drafts")
    assert message.startswith(f"--drafts-from {tmp_path / 'drafts'}: ") and words in message
    (tmp_path / "drafts").write_text("[[1, 280], []]")
    assert plan({}, drafts_from=tmp_path / "drafts").options.drafts_from == tmp_path / "drafts"


@pytest.mark.parametrize("source", [b"\xff", b"{{ " + b"(" * 100_000, b"{{ " + b"9" * 5000 + b" }}"])
def test_a_template_that_cannot_be_read_or_compiled_is_refused(plan: Plan, source: bytes) -> None:
    assert "chat_template.jinja: " in refused(plan, {"chat_template.jinja": source})


@pytest.mark.parametrize("number", [282, 2**24, 2**31, 2**32 - 1])
def test_added_tokens_must_have_the_ids_that_the_library_gives_them(plan: Plan, tmp_path: Path, number: int) -> None:
    document = json.loads((make_ranks(tmp_path / "ranks", 1) / "rank-0-of-1" / "tokenizer.json").read_text())
    document["added_tokens"].append(document["added_tokens"][0] | {"id": number, "content": "zz"})
    assert f"the added token 'zz' has id {number}, " in refused(plan, {"tokenizer.json": document})
    document["added_tokens"][-1]["id"] = 281
    assert plan({"tokenizer.json": document}).tokenizer.size == 282


@pytest.mark.parametrize("number", [2**24, 2**31])
def test_ids_beyond_any_vocabulary_are_refused(plan: Plan, tmp_path: Path, number: int) -> None:
    document = json.loads((make_ranks(tmp_path / "ranks", 1) / "rank-0-of-1" / "tokenizer.json").read_text())
    document["model"]["vocab"]["zz"] = number
    assert f"its largest id is {number}, expected" in refused(plan, {"tokenizer.json": document})


@pytest.mark.parametrize("raw", [b"\xff", b"k\xc3\xa9y", b"", b" \n", b"a\x00b"])
def test_keys_are_lines_of_ascii(plan: Plan, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "key").write_bytes(raw)
    assert f"--api-key-file {tmp_path / 'key'}" in refused(plan, {}, api_key_file=tmp_path / "key")
    (tmp_path / "key").write_text(" sec ret\n")
    assert plan({}, api_key_file=tmp_path / "key").keys.admits("sec ret")


def test_the_command_says_it_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = make_ranks(tmp_path / "ranks", 1)
    (ranks / "rank-0-of-1" / "generation_config.json").write_text('{"temperature": "hot"}')
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    assert main(["serve", str(ranks), "--backend", f"scripted:{script}", "--port", "0"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("duovolt: ") and "generation_config.json: temperature: Expected `float" in line


def test_options_that_only_cards_read_are_known(tmp_path: Path) -> None:
    assert ServeOptions(ranks=tmp_path, lanes=2, drafts=0).asked_of_cards == []
    chosen = {"kv": "fp16", "attention": "plain", "head_split": "on", "graphs": "off", "draft_window": 512}
    asked = ServeOptions(ranks=tmp_path, **chosen).asked_of_cards  # type: ignore[arg-type]
    assert asked == ["--kv fp16", "--attention plain", "--head-split on", "--graphs off", "--draft-window 512"]
    sizes = [ServeOptions(ranks=tmp_path, plain_weights=size).asked_of_cards for size in (None, 0, 4 << 30)]
    assert sizes == [[], ["--plain-weights off"], ["--plain-weights 4294967296"]]
    places = {"kv": "DUOVOLT_KV", "draft_window": "c.toml: draft-window"}
    asked = ServeOptions(ranks=tmp_path, places=places, **chosen).asked_of_cards  # type: ignore[arg-type]
    assert (asked[0], asked[1], asked[-1]) == ("DUOVOLT_KV fp16", "--attention plain", "c.toml: draft-window 512")


def test_drafts_of_a_model_that_has_nothing_to_draft_with(tmp_path: Path) -> None:
    """Asked for, they are refused; else there are none, and that is the plan's word."""
    config = configuration("narrow", 4)
    config["text_config"] |= {"mtp_num_hidden_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--config", str(tmp_path / "config.json"), "--stage", "ranks", "--tp", "1", "--quiet"]
    assert main(["synth", str(tmp_path / "ranks"), *words]) == 0
    options = ServeOptions(ranks=tmp_path / "ranks", backend="reference")
    assert make_plan(options).drafts == make_plan(replace(options, drafts=0)).drafts == 0
    with pytest.raises(InputError, match=r"--drafts has no effect here: .* has no MTP layer"):
        make_plan(replace(options, drafts=2))
    for stated, words in (({"collective": "host"}, "is one rank"), ({"head_split": "on"}, "is one rank")):
        with pytest.raises(InputError, match=f"has no effect here: .* {words}"):
            make_plan(replace(options, **stated))
    idle = {"drafts": 2, "collective": "host", "head_split": "on"}
    plan = make_plan(replace(options, **idle, places={name: f"c.toml: {name}" for name in idle}))
    assert (plan.drafts, plan.options.collective, plan.options.head_split) == (0, "auto", "off")
    assert [line.split(" has no effect here: ")[0] for line in plan.unread] == [f"c.toml: {name}" for name in idle]


def test_pictures_by_url_for_a_model_that_reads_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration("narrow", 4) | {"vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--config", str(tmp_path / "config.json"), "--stage", "ranks", "--tp", "1", "--quiet"]
    assert main(["synth", str(tmp_path / "ranks"), *words]) == 0
    with pytest.raises(InputError, match=r"--allow-image-urls has no effect here: .* reads no pictures"):
        make_plan(ServeOptions(ranks=tmp_path / "ranks", backend="reference", allow_image_urls=True))
    elsewhere = {"allow_image_urls": "DUOVOLT_ALLOW_IMAGE_URLS"}
    options = ServeOptions(
        ranks=tmp_path / "ranks", backend="reference", allow_image_urls=True, places=elsewhere, quiet=False
    )
    plan = make_plan(options)
    assert plan.pictures is None and not plan.options.allow_image_urls
    _tell_plan(plan)
    assert "duovolt serve: DUOVOLT_ALLOW_IMAGE_URLS has no effect here: the model of" in capsys.readouterr().err
