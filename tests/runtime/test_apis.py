"""One meaning behind every API: the same tokens, in any blocks, streamed or whole, give the same answer in each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.messages import GenerateRequest

from .joined import message_is_json, message_of, response_of
from .local_api import LocalApi
from .stub_model import blocks, ids, make_ranks, write_script

USER = [{"role": "user", "content": "hi"}]
PROMPT = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"))
PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=text>\ntwo "€😀"\nlines\n</parameter>\n</function>\n</tool_call>'
)
ARGUMENTS = {"a": 1, "text": 'two "€😀"\nlines'}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("apis")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Hello")})
    return LocalApi(make_ranks(folder / "ranks", 2), script, max_context=1000, max_waiting=9)


def messages(api: LocalApi, cut: list[list[int]], **body: Any) -> Any:
    status, answer = api.say(cut, "/v1/messages", {"messages": USER, "max_tokens": 500} | body)
    assert status == 200, answer
    return answer


def responses(api: LocalApi, cut: list[list[int]], **body: Any) -> Any:
    status, answer = api.say(cut, "/v1/responses", {"input": "hi"} | body)
    assert status == 200, answer
    return answer


def chat(api: LocalApi, cut: list[list[int]], **body: Any) -> Any:
    status, answer = api.say(cut, "/v1/chat/completions", {"messages": USER} | body)
    assert status == 200, answer
    return answer


def timeless(value: Any) -> Any:
    """Without what differs from request to request: ids, times."""
    if isinstance(value, dict):
        return {
            key: timeless(item) for key, item in value.items() if key not in ("id", "call_id", "duovolt", "created_at")
        }
    return [timeless(item) for item in value] if isinstance(value, list) else value


ANSWERS = st.sampled_from(
    [
        "Hello world<|im_end|>",
        "Why.\n</think>\n\nb €😀 beta gamma c<|im_end|>",
        f"x</think>\n\n{CALL}\n{CALL}<|im_end|>",
        f"x</think>before {CALL} between {CALL} behind",
        f"x</think>{CALL[:80]}",
        f"x</think>{CALL[:30]}<|im_end|>",
        "</think><|im_end|>",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    answer=ANSWERS,
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    tools=st.booleans(),
    stop=st.sampled_from([None, ["beta gamma"], ["\n", "zzz"]]),
    limit=st.sampled_from([500, 3, 11, 40]),
)
def test_every_api_says_the_same_for_any_cut(
    api: LocalApi, answer: str, cuts: list[int], tools: bool, stop: Any, limit: int
) -> None:
    """M05 M06 A07 A10 A11: streamed or whole, in blocks of any size, over every API."""
    tokens, cut, position = ids(answer), [], 0
    for size in cuts * len(tokens):
        if position < len(tokens):
            cut.append(tokens[position : position + size])
            position += size
    function = {"name": "add", "parameters": SCHEMA}
    mine = {"max_tokens": limit, "stop_sequences": stop}
    theirs = {"max_output_tokens": limit, "stop": stop, "top_logprobs": 1}
    if tools:
        mine["tools"] = [{"name": "add", "input_schema": SCHEMA}]
        theirs["tools"] = [{"type": "function", **function}]
    reference = chat(
        api,
        [tokens],
        max_tokens=limit,
        stop=stop,
        logprobs=True,
        **({"tools": [{"type": "function", "function": function}]} if tools else {}),
    )
    (choice,) = reference["choices"]
    reasoning = choice["message"].get("reasoning_content", "")
    content = choice["message"]["content"] or ""
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]

    whole = messages(api, [tokens], **mine)
    assert timeless(messages(api, cut, **mine)) == timeless(whole)
    streamed = message_of(messages(api, cut, stream=True, **mine))
    if any(not message_is_json(call["arguments"]) for call in calls):  # cut: only clients' own parsers can tell more
        streamed["content"][-1]["input"] = whole["content"][-1]["input"]
    assert timeless(streamed) == timeless(whole)
    parts = whole["content"]
    assert "".join(part["thinking"] for part in parts if part["type"] == "thinking") == reasoning
    assert "".join(part["text"] for part in parts if part["type"] == "text") == content
    used = [part for part in parts if part["type"] == "tool_use"]
    assert [part["name"] for part in used] == [call["name"] for call in calls]
    for part, call in zip(used, calls, strict=True):
        assert not message_is_json(call["arguments"]) or part["input"] == json.loads(call["arguments"])
    stopped = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice["finish_reason"]]
    assert whole["stop_reason"] == stopped or (stopped == "end_turn" and whole["stop_sequence"] in (stop or []))
    assert whole["usage"]["input_tokens"] == PROMPT or tools
    assert whole["usage"]["output_tokens"] == reference["usage"]["completion_tokens"]

    body = responses(api, [tokens], **theirs)
    assert timeless(responses(api, cut, **theirs)) == timeless(body)
    assert timeless(response_of(responses(api, cut, stream=True, **theirs))) == timeless(body)
    items = body["output"]
    assert "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning") == reasoning
    assert "".join(item["content"][0]["text"] for item in items if item["type"] == "message") == content
    assert [
        {"name": item["name"], "arguments": item["arguments"]} for item in items if item["type"] == "function_call"
    ] == calls
    assert body["status"] == ("incomplete" if choice["finish_reason"] == "length" else "completed")
    assert body["usage"]["total_tokens"] == reference["usage"]["total_tokens"]


@settings(max_examples=40, deadline=None)
@given(
    answer=ANSWERS,
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    stop=st.sampled_from([None, ["beta gamma"], ["\n", "zzz"]]),
    limit=st.sampled_from([500, 3, 11, 40]),
    logprobs=st.sampled_from([None, 0, 1]),
)
def test_completions_say_the_same_for_any_cut(
    api: LocalApi, answer: str, cuts: list[int], stop: Any, limit: int, logprobs: int | None
) -> None:
    """M06 A05 A06: nothing is parsed, and text, log-probabilities, reason and usage do not know of blocks."""
    tokens, cut, position = ids(answer), [], 0
    for size in cuts * len(tokens):
        if position < len(tokens):
            cut.append(tokens[position : position + size])
            position += size
    body = {"prompt": "hi", "max_tokens": limit, "stop": stop, "logprobs": logprobs}
    status, whole = api.say([tokens], "/v1/completions", body)
    assert status == 200, whole
    (choice,) = whole["choices"]
    assert timeless(api.say(cut, "/v1/completions", body)[1]["choices"]) == timeless(whole["choices"])
    _, events = api.say(cut, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    parts = [event["choices"][0] for event in events[:-2]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs is not None else ():
        streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][key]]
        assert streamed == choice["logprobs"][key]


def test_a_message_has_its_blocks_in_order(api: LocalApi) -> None:
    """A10: thinking, text and two tools, each block started, added to and stopped, the thinking one signed."""
    tokens = ids(f"Why.\n</think>\n\nSo: {CALL}\n{CALL}<|im_end|>")
    events = messages(api, [tokens], stream=True, tools=[{"name": "add", "input_schema": SCHEMA}])
    kinds = [
        (
            event["type"].removeprefix("content_block_"),
            (event.get("delta") or event.get("content_block") or {}).get("type"),
        )
        for event in events
    ]
    assert [kind for kind in kinds if kind[1] != "input_json_delta"] == [
        ("message_start", None), ("ping", None),
        ("start", "thinking"), ("delta", "thinking_delta"), ("delta", "signature_delta"), ("stop", None),
        ("start", "text"), ("delta", "text_delta"), ("stop", None),
        ("start", "tool_use"), ("stop", None), ("start", "tool_use"), ("stop", None),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    message = message_of(events)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in message["content"][2:]] == [ARGUMENTS, ARGUMENTS]
    assert len({block["id"] for block in message["content"][2:]}) == 2
    assert message["stop_reason"] == "tool_use"


def test_a_message_counts_its_tokens_once(api: LocalApi) -> None:
    """A11: the prompt in message_start, the answer so far in message_delta; the sum is the body's."""
    tokens = ids("a</think>Hello<|im_end|>")
    events = messages(api, [tokens[:2], tokens[2:]], stream=True)
    assert events[0]["message"]["usage"]["input_tokens"] == PROMPT
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] == len(tokens)
    assert messages(api, [tokens])["usage"] == message_of(events)["usage"]


def test_count_tokens_counts_what_is_then_used(api: LocalApi) -> None:
    """A12: system as blocks, cache_control and other keys tolerated, tools, results; no image."""
    body: dict[str, Any] = {
        "system": [
            {"type": "text", "text": "Be brief. ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "So."},
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no"},
                {"type": "text", "text": "And now?"}]},
        ],
    }  # fmt: skip
    status, counted = api.post("/v1/messages/count_tokens", body)
    assert status == 200
    answer = messages(api, blocks("x</think>y"), **body)
    (sent,) = api.sent
    assert isinstance(sent, GenerateRequest)
    text = api.plan.tokenizer.decode(sent.prompt)
    assert counted == {"input_tokens": len(sent.prompt)} == {"input_tokens": answer["usage"]["input_tokens"]}
    for part in (
        "Be brief. So.",
        "<|im_start|>assistant\nYes.",
        "<|im_start|>tool\n2",
        "<|im_start|>tool\nno",
        "And now?",
    ):
        assert part in text
    assert re.findall(r"<\|im_start\|>(\w+)", text) == [
        "system", "system", "user", "assistant", "tool", "tool", "user", "assistant",
    ]  # fmt: skip


def test_stop_sequences_and_limits_have_their_reasons(api: LocalApi) -> None:
    """A05: a stop string over several tokens is never shown, streamed or whole, and named as the reason."""
    tokens = ids("a</think>one beta gamma two")
    for stream in (False, True):
        found = messages(api, [[token] for token in tokens], stop_sequences=["beta gamma"], stream=stream)
        message = message_of(found) if stream else found
        assert message["content"][1] == {"type": "text", "text": "one "}
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "beta gamma")
    nearly = messages(api, blocks("a</think>one beta gam"), stop_sequences=["beta gamma"])
    assert nearly["content"][1]["text"] == "one beta gam"
    assert nearly["stop_reason"] == "end_turn"
    assert messages(api, [tokens], max_tokens=2)["stop_reason"] == "max_tokens"


def test_thinking_and_tool_choice_reach_the_template(api: LocalApi) -> None:
    plain = messages(api, blocks("Hello"), thinking={"type": "disabled"})
    assert plain["content"] == [{"type": "text", "text": "Hello"}]
    tools = [{"name": "add", "input_schema": SCHEMA}]
    none = messages(api, blocks(f"a</think>{CALL}"), tools=tools, tool_choice={"type": "none"})
    assert none["content"][1] == {"type": "text", "text": CALL}
    one = messages(
        api,
        [ids(f"a</think>{CALL}{CALL}")],
        tools=tools,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block["type"] for block in one["content"]] == ["thinking", "tool_use"]
    assert one["stop_reason"] == "tool_use"
    messages(api, blocks("a</think>b"), tools=tools, tool_choice={"type": "tool", "name": "add"})
    grammar = api.sent[0].grammar  # type: ignore[union-attr]
    assert grammar is not None and "<function=add>" in grammar.text and grammar.after == ids("</think>")[0]
    contrary = {"thinking": {"type": "enabled"}, "output_config": {"effort": "none"}}
    status, refused = api.say([ids("a")], "/v1/messages", {"messages": USER, "max_tokens": 4, **contrary})
    assert status == 400 and "thinking.type and output_config.effort: they say" in refused["error"]["message"]


def test_responses_take_items_and_keep_nothing(api: LocalApi) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    body = responses(api, blocks("x</think>y"), input=items, instructions="Be brief.", reasoning={"effort": "high"})
    text = api.plan.tokenizer.decode(api.sent[0].prompt)  # type: ignore[union-attr]
    assert re.findall(r"<\|im_start\|>(\w+)\n([^<]*)", text)[:4] == [
        ("system", "Be brief."), ("user", "add"), ("assistant", "Yes."), ("tool", "2"),
    ]  # fmt: skip
    assert (body["store"], body["previous_response_id"], body["instructions"]) == (False, None, "Be brief.")
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    cut = responses(api, blocks("x</think>y"), max_output_tokens=2)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    again = responses(api, blocks("x</think>y"), input=[*items, *body["output"]])  # what came out goes back in
    assert again["status"] == "completed"


def test_several_choices_have_their_own_seeds_and_one_prompt(api: LocalApi) -> None:
    from duovolt.runtime.rank.scripted import ScriptedAnswer

    texts = ["a</think>one", "b</think>two two", "c</think>three"]
    for stream in (False, True):
        api.answers = [ScriptedAnswer(blocks(text)) for text in texts]
        body = {
            "messages": USER,
            "n": 3,
            "seed": 2**64 - 1,
            "stream": stream,
            "stream_options": {"include_usage": True},
        }
        _, found = api.post("/v1/chat/completions", body)
        assert [sent.sampling.seed for sent in api.sent] == [2**64 - 1, 0, 1]  # type: ignore[union-attr]
        contents = ["", "", ""]
        if stream:
            usage = found[-2]["usage"]
            for event in found[:-2]:
                (choice,) = event["choices"]
                contents[choice["index"]] += choice["delta"].get("content") or ""
        else:
            usage = found["usage"]
            contents = [choice["message"]["content"] for choice in found["choices"]]
            assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
        assert contents == ["one", "two two", "three"]
        assert usage["prompt_tokens"] == PROMPT
        assert usage["completion_tokens"] == sum(len(ids(text)) + 1 for text in texts)


def test_several_prompts_in_one_completion(api: LocalApi) -> None:
    from duovolt.runtime.rank.scripted import ScriptedAnswer

    api.answers = [ScriptedAnswer(blocks(text)) for text in ("A", "B", "C", "D")]
    _, found = api.post("/v1/completions", {"prompt": ["one", ids("two")], "n": 2, "echo": True})
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        (0, "oneA"), (1, "oneB"), (2, "twoC"), (3, "twoD"),
    ]  # fmt: skip
    assert found["usage"]["prompt_tokens"] == 6


def test_answers_tell_their_times(api: LocalApi) -> None:
    for found in (chat(api, blocks("a</think>b", 2)), messages(api, blocks("a</think>b", 2))):
        times = found["duovolt"]
        assert 0 <= times["queue_ms"] <= times["prompt_ms"]
        assert times["cached_tokens"] == 0 and times["acceptance"] == 1.0
        assert times["tokens_per_second"] is None or times["tokens_per_second"] > 0


def test_the_description_is_made_of_the_types_that_read_the_bodies(api: LocalApi, tmp_path: Path) -> None:
    document = api.request("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    routes = set(
        re.findall(
            r'"(?:GET|POST)", "(/[^"{]+)"', Path(__file__).parents[2].joinpath("runtime/proxy/app.py").read_text()
        )
    )
    assert routes == set(document["paths"])
    chat_body = document["components"]["schemas"]["ChatBody"]
    assert chat_body["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert chat_body["required"] == ["messages"]
