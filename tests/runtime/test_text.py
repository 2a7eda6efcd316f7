"""Text from tokens: whole characters, stop strings, reasoning and calls, whatever the cut of the stream."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.proxy.assembly import AnswerStyle, Assembler, CallArguments, CallEnd, CallStart, Content, Reasoning
from duovolt.runtime.proxy.text import StopStrings, Utf8Stream
from duovolt.runtime.proxy.tokenizer import TextTokenizer
from duovolt.runtime.proxy.tools import CallReader, ToolCall, parse_tool_call

from .stub_model import byte_ids, ids, make_directory, make_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "$defs": {"Count": {"type": "integer"}},
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "at": {"type": ["string", "null"]},
                "where": {"type": "object"},
                "rank": {"enum": [1, 20]},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
                "circle": {"$ref": "#/properties/circle"},
            },
        },
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSankt\nGallen\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=where>\n{"lat": 47.4}\n</parameter>\n</function>\n</tool_call>'
)
CALL_ARGUMENTS = {"city": "Sankt\nGallen", "days": 3, "where": {"lat": 47.4}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(make_directory(tmp_path_factory.mktemp("tokenizer")))


def style(
    stops: list[str] | None = None, *, thinking: bool = False, tools: bool = False, split: bool = True
) -> AnswerStyle:
    end = frozenset(ids("<|im_end|>"))
    return AnswerStyle(end, stops or [], split=split, thinking=thinking, tools=[WEATHER] if tools else [])


def read(tokenizer: TextTokenizer, how: AnswerStyle, blocks: list[list[int]], end: str = "length") -> dict[str, object]:
    """All parts of an answer that comes in `blocks` and then ends."""
    assembler = Assembler(tokenizer, how)
    found: dict[str, object] = {}
    content, reasoning, calls, order, counted = "", "", [], [], 0
    for number, block in enumerate(blocks):
        for token in block:
            assembler.feed(token)
        if number == len(blocks) - 1:
            assembler.end(end)
        delta = assembler.take()
        counted += len(delta.in_content)
        for piece in delta.pieces:
            if not order or order[-1] != type(piece).__name__:
                order.append(type(piece).__name__)
            match piece:
                case Content(text, _):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append(ToolCall(name, ""))
                case CallArguments(text, index):
                    calls[index] = ToolCall(calls[index].name, calls[index].arguments + text)
                case CallEnd(index, whole, known):
                    assert index == len(calls) - 1
                    assert not whole or json.loads(calls[index].arguments) == known
    assert counted == assembler.tokens
    found.update(content=content, reasoning=reasoning, calls=calls, finish=assembler.finish, tokens=assembler.tokens)
    found.update(order=order, stop=assembler.stop, reasoning_tokens=assembler.reasoning_tokens)
    return found


PIECES = st.sampled_from(
    [
        "Hello",
        " beta",
        " gamma",
        "€",
        "😀",
        "\n",
        "</think>",
        "<think>",
        "<tool_call>",
        CALL,
        "한글",
        "<|im_start|>",
        "a",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    thinking=st.booleans(),
    tools=st.booleans(),
    stops=st.sampled_from([[], [" beta gamma"], ["€", "beta"], ["\n\n", "aHello"]]),
    ended=st.booleans(),
    raw=st.binary(max_size=6),
)
def test_the_cut_into_blocks_does_not_matter(
    tokenizer: TextTokenizer,
    pieces: list[str],
    cuts: list[int],
    thinking: bool,
    tools: bool,
    stops: list[str],
    ended: bool,
    raw: bytes,
) -> None:
    """M06: one token stream in blocks of any size."""
    stream = ids("".join(pieces)) + byte_ids(raw) + (ids("<|im_end|>") if ended else [])
    blocks, position = [], 0
    for size in cuts * len(stream):
        if position < len(stream):
            blocks.append(stream[position : position + size])
            position += size
    how = style(stops, thinking=thinking, tools=tools)
    whole = read(tokenizer, how, [stream])
    assert read(tokenizer, how, blocks) == whole
    assert read(tokenizer, how, [[token] for token in stream]) == whole


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_bytes_in_any_cut_decode_as_the_whole(data: bytes, cuts: list[int]) -> None:
    stream, edges = Utf8Stream(), [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    text = "".join(stream.feed(data[begin:end]) for begin, end in pairwise(edges)) + stream.end()
    assert text == data.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_stop_strings_cut_where_the_first_one_is_complete(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(begin + len(stop), begin) for stop in stops for begin in range(len(text)) if text.startswith(stop, begin)]
    expected = text[: min(ends)[1]] if ends else text
    matcher, shown, position = StopStrings(stops), "", 0
    for size in cuts * (len(text) + 1):
        if matcher.stopped or position >= len(text):
            break
        shown += matcher.feed(text[position : position + size])
        position += size
        assert expected.startswith(shown)  # nothing that belongs to a stop string is ever shown
    shown += "" if matcher.stopped else matcher.end()
    assert shown == expected
    assert (matcher.stopped is not None) == bool(ends)
    assert not ends or matcher.stopped == text[min(ends)[1] : min(ends)[0]]


def test_decoding_equals_the_tokenizer_librarys(tokenizer: TextTokenizer) -> None:
    text = "Hello world €😀 한글 \x00\x7f <think>x</think> beta gamma"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    partial = byte_ids("😀".encode()[:3]) + ids("x")
    assert tokenizer.decode(partial) == make_tokenizer().decode(partial, skip_special_tokens=False)
    assert tokenizer.size == make_tokenizer().get_vocab_size()
    assert tokenizer.stop_ids == ids("<|im_end|>")


def test_a_character_cut_by_the_length_limit_decodes_as_the_whole_would(tokenizer: TextTokenizer) -> None:
    """A06."""
    found = read(tokenizer, style(), [byte_ids("ok 😀".encode()[:-1])])
    assert found["content"] == "ok �"
    assert found["finish"] == "length"


def test_thinking_ends_inside_a_block_and_loses_nothing(tokenizer: TextTokenizer) -> None:
    """M05: the end of thinking and a call in one step."""
    block = ids("\nI Write.\n</think>\n\n" + CALL + "<|im_end|>")
    found = read(tokenizer, style(thinking=True, tools=True), [block])
    assert found["reasoning"] == "I Write."
    assert found["content"] == ""
    (call,) = found["calls"]  # type: ignore[misc]
    assert (call.name, json.loads(call.arguments)) == ("weather", CALL_ARGUMENTS)
    assert found["finish"] == "tool_calls"


def test_thinking_begun_by_the_model_is_split_and_a_later_tag_is_text(tokenizer: TextTokenizer) -> None:
    found = read(tokenizer, style(), [ids("<think>a</think>b <think> c")])
    assert (found["reasoning"], found["content"]) == ("a", "b <think> c")


def test_stop_strings_do_not_act_in_reasoning(tokenizer: TextTokenizer) -> None:
    found = read(tokenizer, style(["beta"], thinking=True), [ids("about beta</think>x beta y")])
    assert (found["reasoning"], found["content"], found["finish"]) == ("about beta", "x ", "stop")


def test_without_tools_a_call_is_text(tokenizer: TextTokenizer) -> None:
    """A09."""
    found = read(tokenizer, style(), [ids(CALL)])
    assert (found["content"], found["calls"]) == (CALL, [])


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> starts a call",
        "<tool_call>\n<function=weath",
        "<tool_call>x</tool_call>",
        "Write <tool_call><function=NAME> and </tool_call>",
    ],
)
def test_what_is_no_call_stays_text_even_with_tools(tokenizer: TextTokenizer, text: str) -> None:
    """A09."""
    found = read(tokenizer, style(tools=True), [ids(text)])
    assert (found["content"], found["calls"], found["finish"]) == (text, [], "length")


def test_a_call_cut_by_the_length_limit_keeps_what_was_written_and_has_no_end(tokenizer: TextTokenizer) -> None:
    """A08: arguments that nobody can take for whole ones."""
    cut = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nSankt Gal"
    found = read(tokenizer, style(tools=True), [ids(cut)])
    assert found["calls"] == [ToolCall("weather", '{"days": 3, "city": "Sankt Gal')]
    assert (found["content"], found["finish"]) == ("", "length")
    ended = read(tokenizer, style(tools=True), [ids(cut + "<|im_end|>")])  # the model itself stopped there
    assert ended["calls"] == [ToolCall("weather", '{"days": 3, "city": "Sankt Gal"}')]
    assert ended["finish"] == "tool_calls"
    whole = read(tokenizer, style(tools=True), [ids(CALL.removesuffix("\n</tool_call>"))])
    assert json.loads(whole["calls"][0].arguments) == CALL_ARGUMENTS  # type: ignore[index]


def test_text_arguments_come_while_they_are_written(tokenizer: TextTokenizer) -> None:
    reader = CallReader([WEATHER])
    assert reader.feed("\n<function=weather>\n<parameter=city>\nSankt") == '{"city": "Sankt'
    assert reader.name == "weather"
    assert [reader.feed(text) for text in ('\n"G', "allen", "\n</para", "graph>", "\n</parameter>\n")] == [
        '\\n\\"G', "allen", "", "\\n</paragraph>", '"',
    ]  # fmt: skip
    assert reader.feed("<parameter=days>\n1") == ""
    assert reader.feed("2\n</parameter>\n<parameter=city>\nagain\n</parameter>\n</function>\n") == ', "days": 12'
    assert reader.close() == "}"
    assert reader.known == {"city": 'Sankt\n"Gallen\n</paragraph>', "days": 12}


def test_a_call_of_an_unknown_function_is_one_if_it_is_whole(tokenizer: TextTokenizer) -> None:
    whole = "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    assert parse_tool_call(whole, [WEATHER]) == ToolCall("other", '{"a": "1"}')
    assert parse_tool_call("<function=other>\nand so on", [WEATHER]) is None


def test_two_calls_and_the_text_before(tokenizer: TextTokenizer) -> None:
    found = read(tokenizer, style(tools=True), [ids(f"Hello\n{CALL}\n{CALL}<|im_end|>")])
    assert found["content"] == "Hello\n"
    assert len(found["calls"]) == 2  # type: ignore[arg-type]
    assert found["finish"] == "tool_calls"


def test_what_may_begin_a_stop_string_comes_before_the_call_behind_it(tokenizer: TextTokenizer) -> None:
    found = read(tokenizer, style(["Hello beta"], tools=True), [ids(f"Hello{CALL} beta gamma<|im_end|>")])
    assert found["content"] == "Hello beta gamma" and found["finish"] == "tool_calls"
    assert found["order"] == ["Content", "CallStart", "CallArguments", "CallEnd", "Content"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("metric", "True", True),
        ("metric", "false", False),
        ("at", "null", None),
        ("at", "5", "5"),
        ("where", "[1, 2]", [1, 2]),
        ("unknown", "4", "4"),
        ("rank", "20", 20),
        ("maybe", "4", 4),
        ("maybe", "null", None),
        ("circle", "4", "4"),
        ("city", " padded \n\nlines ", " padded \n\nlines "),
    ],
)
def test_values_are_typed_by_the_schema(key: str, text: str, value: object) -> None:
    call = parse_tool_call(f"\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n", [WEATHER])
    assert call is not None
    assert json.loads(call.arguments) == {key: value}


def test_the_older_json_form_is_read() -> None:
    call = parse_tool_call('\n{"name": "weather", "arguments": {"city": "Bern"}}\n', [WEATHER])
    assert call == ToolCall("weather", '{"city": "Bern"}')
    assert parse_tool_call('{"name": 3', [WEATHER]) is None


NO_CALLS = [
    '{"name": ["f"], "arguments": {}}',
    '{"name": null}',
    '{"name": ""}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": 3}',
    '{"name": "f", "arguments": "text"}',
    '{"name": "f", "arguments": "[1]"}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
    '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "f", "arguments": ' + "[" * 3000,
    '{"name": "f", "arguments": {"a": ' + "[" * 100000 + "]" * 100000 + "}}",
    '{"a":' * 3000,
]


@pytest.mark.parametrize("text", NO_CALLS, ids=[str(number) for number in range(len(NO_CALLS))])
def test_json_that_is_no_call_is_shown_as_text(tokenizer: TextTokenizer, text: str) -> None:
    assert parse_tool_call(text, []) is None
    found = read(tokenizer, style(tools=True), [ids(f"<tool_call>{text}</tool_call><|im_end|>")])
    assert (found["content"], found["calls"], found["finish"]) == (f"<tool_call>{text}</tool_call>", [], "stop")


VALUES = [
    ("NaN", "NaN"),
    ("-Infinity", "-Infinity"),
    ("1e999", "1e999"),
    ("9" * 5000, "9" * 5000),
    ("[" * 3000, "[" * 3000),
    ("[" * 100000 + "]" * 100000, "[" * 100000 + "]" * 100000),
    ('"\\ud83d"', "\ufffd"),
    ('["\\ud83d\\ude00", "\\ude00\\ud83d"]', ["\U0001f600", "\ufffd\ufffd"]),
    ('{"\\udc00": 1}', {"\ufffd": 1}),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_arguments_are_strict_json_whatever_the_model_writes(text: str, value: object) -> None:
    call = parse_tool_call(f"<function=weather><parameter=where>{text}</parameter></function>", [WEATHER])
    assert call is not None
    assert msgspec.json.decode(call.arguments.encode()) == {"where": value}


def test_surrogates_of_the_older_form_are_replaced_and_arguments_given_as_text_or_null_are_read() -> None:
    assert parse_tool_call('{"name": "f\\ud800", "arguments": {"a": "\\ud83d"}}', []) == ToolCall(
        "f\ufffd", '{"a": "\ufffd"}'
    )
    assert parse_tool_call('{"name": "f", "arguments": "{\\"a\\": 1}"}', []) == ToolCall("f", '{"a": 1}')
    assert parse_tool_call('{"name": "f", "arguments": null}', []) == ToolCall("f", "{}")
    assert parse_tool_call('{"name": "f"}', []) == ToolCall("f", "{}")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from('{}[]":,\\ud8NaIfnity1e9 \n<>/=parmetfuco'), max_size=60))
def test_no_text_of_a_call_breaks_the_reading(text: str) -> None:
    for whole in (text, '{"name": "f", "arguments": ' + text, f"<function=weather><parameter=where>{text}</function>"):
        call = parse_tool_call(whole, [WEATHER])
        assert call is None or isinstance(msgspec.json.decode(call.arguments.encode()), dict)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    document = json.loads((directory / "tokenizer.json").read_text())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"decoder 'WordPiece'; only byte-level BPE"):
        TextTokenizer(directory)
