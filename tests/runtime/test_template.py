"""The chat template: rendered as the transformers library renders it, refused with the template's own words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.proxy.apis.chat_request import build_chat_prompt
from duovolt.runtime.proxy.errors import ApiError
from duovolt.runtime.proxy.schema import ChatBody
from duovolt.runtime.proxy.template import ChatTemplate
from duovolt.runtime.proxy.tokenizer import TextTokenizer
from duovolt.runtime.rank.identity import tokenizer_digest

from .stub_model import make_directory, make_tokenizer

TINY = Path(__file__).parents[2] / "tiny" / "chat_template.jinja"
TOOL = {"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"b": 1, "a": 2}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"k": "v\\nw", "n": 3}'}}
PARSED_CALL = CALL | {"function": {"name": "f", "arguments": {"k": "v\nw", "n": 3}}}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'q'"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nTwo"},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ],
]


def directory(folder: Path, source: str) -> Path:
    make_directory(folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_equal_those_of_transformers(
    tmp_path: Path, talk: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool | None
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = directory(tmp_path, TINY.read_text())
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>")
    reference.chat_template = TINY.read_text()
    body = ChatBody(messages=talk, tools=tools, enable_thinking=thinking)
    tokenizer = TextTokenizer(folder)
    prompt = build_chat_prompt(body, ChatTemplate(folder, tokenizer))
    variables = {} if thinking is None else {"enable_thinking": thinking}
    parsed = [message | ({"tool_calls": [PARSED_CALL]} if "tool_calls" in message else {}) for message in talk]
    expected = reference.apply_chat_template(
        parsed, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    assert prompt.text == expected
    assert prompt.thinking == expected.rstrip().endswith("<think>")
    assert tokenizer.encode(prompt.text) == reference(expected, add_special_tokens=False)["input_ids"]


def test_what_a_template_raises_reaches_the_client(tmp_path: Path) -> None:
    folder = directory(tmp_path, "{{ raise_exception('no system here') }}")
    template = ChatTemplate(folder, TextTokenizer(folder))
    with pytest.raises(ApiError, match="no system here") as refusal:
        template.render([{"role": "user", "content": "x"}], None, {})
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[5].content.x.y }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"]
)
def test_a_failing_or_prying_template_is_a_400(tmp_path: Path, source: str) -> None:
    folder = directory(tmp_path, source)
    template = ChatTemplate(folder, TextTokenizer(folder))
    with pytest.raises(ApiError, match="the chat template refuses this conversation"):
        template.render([{"role": "user", "content": "x"}], None, {})


def test_a_template_that_does_not_compile_stops_the_start(tmp_path: Path) -> None:
    folder = directory(tmp_path, "{% if %}")
    with pytest.raises(InputError, match="does not compile"):
        ChatTemplate(folder, TextTokenizer(folder))


def test_without_a_template_chat_is_refused_and_says_what_to_use(tmp_path: Path) -> None:
    folder = make_directory(tmp_path)
    (folder / "chat_template.jinja").unlink()
    template = ChatTemplate(folder, TextTokenizer(folder))
    with pytest.raises(ApiError, match="use /v1/completions"):
        template.render([], None, {})


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_told_and_does_not_hang(tmp_path: Path) -> None:
    folder = make_directory(tmp_path)
    tokenizer = TextTokenizer(folder)
    for name in ("chat_template.jinja", "tokenizer.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    with pytest.raises(InputError, match="not a regular file, where a chat template was expected"):
        ChatTemplate(folder, tokenizer)
    for read in (TextTokenizer, tokenizer_digest):
        with pytest.raises(InputError, match="not a regular file, where a tokenizer was expected"):
            read(folder)
