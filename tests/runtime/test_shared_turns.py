"""Where the next prompt of a conversation parts from this one, by the template's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duovolt.runtime.images.placing import Pixels, place
from duovolt.runtime.proxy.apis.chat_request import ChatPrompt, build_chat_prompt
from duovolt.runtime.proxy.schema import ChatBody
from duovolt.runtime.proxy.shared_turns import common_length, token_ends
from duovolt.runtime.proxy.template import ChatTemplate
from duovolt.runtime.proxy.tokenizer import TextTokenizer

from .stub_model import make_directory

TEMPLATE = (Path(__file__).parents[2] / "tiny" / "chat_template.jinja").read_text()
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"k": "v"}'}}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
LOOP = [
    *QUESTION,
    {"role": "assistant", "content": "", "reasoning_content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "result"},
]
NEXT: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": "Two", "reasoning_content": "Hm."}, {"role": "user", "content": "Three?"}],
    [{"role": "assistant", "content": "<think>\n\n</think>\n\nTwo"}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": "\n \n"}, {"role": "user", "content": "\n"}],
    [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "r"}],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTemplate, TextTokenizer]:
    return read(tmp_path_factory.mktemp("model"), TEMPLATE)


def read(folder: Path, template: str) -> tuple[ChatTemplate, TextTokenizer]:
    make_directory(folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer(folder)
    return ChatTemplate(folder, tokenizer), tokenizer


def prompt(model: tuple[ChatTemplate, TextTokenizer], talk: list[dict[str, Any]], **fields: Any) -> ChatPrompt:
    return build_chat_prompt(ChatBody(messages=talk, **fields), model[0])


def ends(model: tuple[ChatTemplate, TextTokenizer], talk: list[dict[str, Any]], **fields: Any) -> tuple[list, list]:
    """The prompt's ids, and where later prompts part from it."""
    found = prompt(model, talk, **fields)
    ids = model[1].encode(found.text)
    return ids, token_ends(model[1], found.text, ids, found.shared)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("talk", [QUESTION, [*QUESTION, *NEXT[0]]])
def test_every_next_turn_begins_with_what_is_kept(model, talk: list, following: list, thinking: bool) -> None:
    ids, (end,) = ends(model, talk, enable_thinking=thinking)
    opening = prompt(model, talk, enable_thinking=thinking).text.rpartition("<|im_start|>")
    assert ids[end:] == model[1].encode(opening[1] + opening[2])
    assert model[1].encode(prompt(model, [*talk, *following]).text)[:end] == ids[:end]


def test_reasoning_between_calls_is_left_out_of_the_next_turn(model) -> None:
    """Within the loop the prompt only grows; the next question parts where the first call's turn begins."""
    ids, (early, late) = ends(model, LOOP)
    going = [*LOOP, *NEXT[3]]
    asking = [*LOOP, *NEXT[0]]
    assert model[1].encode(prompt(model, going).text)[:late] == ids[:late]
    asked = model[1].encode(prompt(model, asking).text)
    assert asked[:early] == ids[:early] and asked[:late] != ids[:late]
    assert early == ends(model, QUESTION)[1][0]


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "x",
    ],
)
def test_templates_of_other_forms_give_no_place(tmp_path: Path, template: str) -> None:
    other = read(tmp_path, template)
    assert ends(other, QUESTION)[1] == []


@given(st.text("ab"), st.text("ab"), st.text("ab"))
def test_common_length(start: str, one: str, other: str) -> None:
    found = common_length(start + one, start + other)
    assert (start + one)[:found] == (start + other)[:found] and found >= len(start)
    assert (start + one)[: found + 1] != (start + other)[: found + 1] or found == min(len(one), len(other)) + len(start)


def test_places_count_the_tokens_of_pictures() -> None:
    ids = [1, 9, 2, 9, 3]
    placed = place(ids, {9: [Pixels(64, 32, b""), Pixels(96, 32, b"")]}, 32)
    assert placed.ids == [1, 9, 9, 2, 9, 9, 9, 3]
    assert [placed.index(count) for count in range(6)] == [0, 1, 3, 4, 7, 8]
