"""Every bad request gets one clear 4xx in OpenAI's shape, and the ranks never hear of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.proxy.apis import completions
from duovolt.runtime.rank.scripted import ScriptedAnswer

from .local_api import LocalApi
from .stub_model import blocks, make_ranks, write_script

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
CONTEXT = 1000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("api")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Hello")})
    return LocalApi(make_ranks(folder / "ranks", 2), script, max_context=CONTEXT, max_waiting=2)


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def function(name: str, *parameters: str) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {key: {} for key in parameters}}
    return [{"type": "function", "function": {"name": name, "parameters": schema}}]


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "g"}}
LONG = {"messages": [{"role": "user", "content": "x" * CONTEXT}]}
BAD: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, b"{", 400, None, "not valid JSON"),
    (CHAT, b"\xff\xfe", 400, None, "not valid JSON"),
    (CHAT, b'{"messages": [{"role": "user", "content": ' + b"[" * 100000 + b"]" * 100000 + b"}]}", 400, None, "JSON"),
    (CHAT, b"", 400, None, "not valid JSON"),
    (CHAT, [], 400, None, "object"),
    (CHAT, {}, 400, "messages", "messages is missing"),
    (CHAT, {"messages": []}, 400, "messages", "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages", "array"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "messages[0].content is missing"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text only"),
    (CHAT, {"messages": [calling("{")]}, 400, "messages", "not JSON"),
    (CHAT, {"messages": USER, "max_tokens": "5"}, 400, "max_tokens", "Expected `int | null`, got `str`"),
    (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens", ">= 1"),
    (CHAT, {"messages": USER, "max_tokens": 10**8}, 400, "max_tokens", f"context is {CONTEXT} tokens; the request has"),
    (CHAT, {"messages": USER, "max_completion_tokens": 10**30}, 400, "max_completion_tokens", ""),
    (CHAT, LONG, 400, "prompt", f"context is {CONTEXT} tokens"),
    (CHAT, {"messages": USER, "temperature": 3}, 400, "temperature", "<= 2"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, None, "not valid JSON"),
    (CHAT, {"messages": USER, "top_p": 0}, 400, "top_p", "> 0"),
    (CHAT, {"messages": USER, "n": 0}, 400, "n", ">= 1"),
    (CHAT, {"messages": USER, "n": 0, "stream": True}, 400, "n", ">= 1"),
    (CHAT, {"messages": USER, "n": 4}, 400, "n", "4 answers in one request, this server holds 3"),
    (CHAT, {"messages": USER, "n": 129}, 400, "n", "<= 128"),
    (CHAT, {"messages": USER, "stream": "yes"}, 400, "stream", "`bool"),
    (CHAT, {"messages": USER, "stop": ["a", ""]}, 400, "stop", "empty"),
    (CHAT, {"messages": USER, "stop": ["a"] * 17}, 400, "stop", "17 strings"),
    (CHAT, {"messages": USER, "logit_bias": {"-1": 1}}, 400, "logit_bias", "token id"),
    (CHAT, {"messages": USER, "logit_bias": {"99999": 1}}, 400, "logit_bias", "token id"),
    (CHAT, {"messages": USER, "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "'11111111111111111111...' is not a token"),
    (CHAT, {"messages": USER, "logit_bias": {"\u0663": 1}}, 400, "logit_bias", "token id"),
    (CHAT, {"messages": USER, "repetition_penalty": 0.0099}, 400, "repetition_penalty", ">= 0.01"),
    (CHAT, {"messages": USER, "repetition_penalty": 10.1}, 400, "repetition_penalty", "<= 10"),
    (CHAT, {"messages": [calling("[" * 100000)]}, 400, "messages", "arguments are not JSON: nested too deep"),
    (CHAT, {"messages": [calling('{"a":' * 100000)]}, 400, "messages", "arguments are not JSON: nested too deep"),
    (CHAT, {"messages": [calling('{"a": "\\ud800"}')]}, 400, "messages", "messages[0].tool_calls[0]: arguments hold half"),
    (CHAT, {"messages": [calling('{"a": NaN}')]}, 400, "messages", "NaN is no JSON number"),
    (CHAT, {"messages": [calling('{"a": ' + "9" * 5000 + "}")]}, 400, "messages", "arguments are not JSON"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, "not valid JSON"),
    (COMPLETION, b'{"prompt": "\\ud800"}', 400, None, "not valid JSON"),
    ("/tokenize", {"messages": [calling('{"a": "\\ud800"}')]}, 400, "messages", "half of a surrogate pair"),
    (CHAT, {"messages": USER, "stop_token_ids": [2**70]}, 400, "stop_token_ids", "<= 2147483647"),
    (CHAT, {"messages": USER, "stop_token_ids": [2**31]}, 400, "stop_token_ids", "<= 2147483647"),
    (CHAT, {"messages": USER, "top_k": 2**70}, 400, "top_k", "<= 2147483647"),
    (CHAT, {"messages": USER, "top_k": -2}, 400, "top_k", ">= -1"),
    (CHAT, {"messages": USER, "seed": 2**64}, 400, "seed", "-2^63 to 2^64 - 1"),
    (CHAT, {"messages": USER, "seed": -(2**63) - 1}, 400, "seed", "-2^63 to 2^64 - 1"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}", 400, "seed", "out of range"),
    (CHAT, {"messages": USER, "n": 2**70}, 400, "n", "<= 128"),
    (COMPLETION, {"prompt": "x", "best_of": -(2**70)}, 400, "best_of", ">= -2147483648"),
    (COMPLETION, {"prompt": "x", "max_tokens": 2**31}, 400, "max_tokens", "<= 2147483647"),
    ("/detokenize", {"tokens": [2**70]}, 400, "tokens", "<= 2147483647"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools", "tools[0]"),
    (CHAT, {"messages": USER, "tools": function("a") + function("b") + function("a")}, 400, "tools",
     "tools[2]: 'a' is the name of tools[0], too"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice", "no tools"),
    (CHAT, {"messages": USER, "tool_choice": "some"}, 400, "tool_choice", "expected auto, none, required"),
    (CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": NAMED}, 400, "tool_choice", "no tool is called 'g'"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "response_format", "expected text, json_object"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format", "expected a JSON schema"),
    (CHAT, {"messages": USER, "response_format": form({"type": "bogus"})}, 400, "response_format", "cannot be kept"),
    (CHAT, {"messages": USER, "response_format": form({"$ref": "http://127.0.0.1:9/x"})}, 400, "response_format", "kept"),
    (CHAT, {"messages": USER, "response_format": form({"not": {"type": "string"}})}, 400, "response_format", "kept"),
    (CHAT, {"messages": USER, "response_format": form({"enum": ["x" * 1100000]})}, 400, "response_format", "characters"),
    (CHAT, {"messages": USER, "response_format": form({"anyOf": [{"multipleOf": 99991}]})}, 400, "response_format", "99991"),
    (CHAT, {"messages": USER, "response_format": form({"multipleOf": 9999.9999})}, 400, "response_format", "9999.9999"),
    (CHAT, {"messages": USER, "response_format": form({"multipleOf": 1e300})}, 400, "response_format", "1e+300"),
    (CHAT, {"messages": USER, "response_format": form({"multipleOf": True})}, 400, "response_format", "cannot be kept"),
    (CHAT, {"messages": USER, "tools": function("a\nb"), "tool_choice": "required"}, 400, "tools", "'a\\nb' cannot be"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer",
     "multipleOf": 99991}}}}}], "tool_choice": "required"}, 400, "tools", "99991"),
    (CHAT, {"messages": USER, "tools": function("a", "b>"), "tool_choice": "required"}, 400, "tools", "'b>' of 'a' cannot"),
    (CHAT, {"messages": USER, "response_format": form({"properties": {str(key): {} for key in range(1001)}})}, 400,
     "response_format", "1001 properties, at most 1000"),
    (CHAT, {"messages": USER, "response_format": form({}), "ignore_eos": True}, 400, "ignore_eos", "ends where"),
    (COMPLETION, {"prompt": "x", "response_format": form({"type": 3})}, 400, "response_format", "cannot be kept"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "without logprobs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinkng": False}}, 400, "chat_template_kwargs",
     "reads no 'enable_thinkng' of a request; its variables: divisor, enable_thinking"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"add_generation_prompt": False}}, 400, "chat_template_kwargs", "reads no"),
    (CHAT, {"messages": USER, "top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "<= 20"),
    (COMPLETION, {}, 400, "prompt", "prompt is missing"),
    (COMPLETION, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETION, {"prompt": [[1], 2]}, 400, "prompt", "2 is neither a text nor a list"),
    (COMPLETION, {"prompt": ["a"] * 9}, 400, "n", "9 answers in one request, this server holds 3"),
    (COMPLETION, {"prompt": [["y" * 100000]]}, 400, "prompt", "'yyy"),
    (CHAT, {"messages": [{"role": "r" * 100000}]}, 400, "messages", "'rrr"),
    (COMPLETION, {"prompt": [1, -1]}, 400, "prompt", "-1 is not a token id"),
    (COMPLETION, {"prompt": [1, 2.5]}, 400, "prompt", "2.5 is not a token id"),
    (COMPLETION, {"prompt": [1, True]}, 400, "prompt", "True is not a token id"),
    (COMPLETION, {"prompt": [10**9]}, 400, "prompt", "is not a token id"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "echo"),
    (COMPLETION, {"prompt": "x", "best_of": 3}, 400, "best_of", "use n"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
    (COMPLETION, {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, 400, "stream", "cannot be streamed"),
    ("/tokenize", {}, 400, "prompt", "either"),
    ("/detokenize", {"tokens": [99999]}, 400, "tokens", "not below"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", ">= 0"),
    ("/v1/nothing", {}, 404, None, "no such path"),
    ("/v1/models", {}, 405, None, "POST is not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"), BAD, ids=[str(number) for number in range(len(BAD))]
)
def test_bad_input_gets_one_clear_error(
    api: LocalApi, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    found, answer = api.post(path, body)
    assert found == status, answer
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 1100, "a message is no echo of the body"
    assert api.sent == []


def test_too_many_prompts_are_counted_before_anything_is_made_of_them(
    api: LocalApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "plan_completion", None)
    status, answer = api.post(COMPLETION, {"prompt": [[1], [2], [3], [4]]})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "4 answers in one request, this server holds 3" in answer["error"]["message"]


def test_a_body_too_large_is_413(api: LocalApi) -> None:
    status, answer = api.post(CHAT, b" " * (32 * 2**20 + 1))
    assert status == 413
    assert answer["error"]["code"] == "body_too_large"


ANTHROPIC = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"


def mine(content: Any, role: str = "user") -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": role, "content": content}]}


OTHERS: list[tuple[str, Any, str]] = [
    (ANTHROPIC, b"{", "not valid JSON"),
    (ANTHROPIC, {"messages": USER}, "max_tokens"),
    (ANTHROPIC, {"max_tokens": 5, "messages": []}, "messages"),
    (ANTHROPIC, mine("x", "tool"), "messages[0].role: 'tool' is not one of user, assistant, system"),
    (ANTHROPIC, mine(3), "messages[0].content: expected text or a list of blocks"),
    (ANTHROPIC, mine(["x"]), "messages[0].content: expected text or a list of blocks"),
    (ANTHROPIC, mine([{"type": "text"}]), "messages[0].content[0]: expected a block of type text"),
    (ANTHROPIC, mine([{"type": "text", "text": "a"}, {"type": "image"}]), "messages[0].content[1].source: expected type base64"),
    (ANTHROPIC, mine([{"type": "tool_result", "content": [{"type": "image"}]}]),
     "messages[0].content[0].content[0].source: expected type base64"),
    (ANTHROPIC, mine("x", "assistant"), "cannot go on with one"),
    (ANTHROPIC, mine("x") | {"max_tokens": 0}, ">= 1"),
    (ANTHROPIC, mine("x") | {"max_tokens": 10**30}, "max_tokens"),
    (ANTHROPIC, mine("x") | {"system": [{"type": "image"}]}, "system.content[0]: text is read here, not image"),
    (ANTHROPIC, mine("x") | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "custom tools only"),
    (ANTHROPIC, mine("x") | {"tools": [{"name": "f"}]}, "tools[0]: expected a name and an input_schema"),
    (ANTHROPIC, mine("x") | {"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1]: 'f' is the name of tools[0], too"),
    (ANTHROPIC, mine("x") | {"tool_choice": {"type": "tool"}}, "tool_choice"),
    (ANTHROPIC, mine("x") | {"tool_choice": {"type": "any"}}, "has no tools"),
    (ANTHROPIC, mine("x") | {"thinking": {"type": "maybe"}}, "thinking.type"),
    (ANTHROPIC, mine("x") | {"stop_sequences": [""]}, "stop_sequences: an empty"),
    (ANTHROPIC, mine([{"type": "tool_result", "content": {"a": 1}}]), "messages[0].content[0].content: expected text or a list"),
    (ANTHROPIC, mine("x") | {"temperature": 9}, "<= 2"),
    (ANTHROPIC, mine("x") | {"output_config": {"format": {"type": "json_schema"}}},
     "output_config.format.schema: expected a JSON schema"),
    (COUNT, {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
     "messages[0].content[0]: text is read here, not document"),
    (RESPONSES, b"{,", "not valid JSON"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "expected text or at least one item"),
    (RESPONSES, {"input": "x", "store": True}, "keeps no state"),
    (RESPONSES, {"input": "x", "previous_response_id": "r"}, "keeps no state"),
    (RESPONSES, {"input": "x", "conversation": "c"}, "keeps no state"),
    (RESPONSES, {"input": "x", "background": True}, "keeps no state"),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "never cuts"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0]: expected image_url, a URL as text"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0]: expected a name and arguments"),
    (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f", "arguments": "{"}]},
     "input[1]: arguments are not JSON"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "functions only"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}] * 2}, "tools[1]: 'f' is the name"),
    (RESPONSES, {"input": "x", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "cannot be kept"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema: expected a JSON schema"),
    (RESPONSES, {"input": "x", "chat_template_kwargs": {"divisor": 0}}, "the chat template refuses this conversation"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format 'xml': expected"),
    (RESPONSES, {"input": "x", "max_output_tokens": 10**8}, "for the answer (max_output_tokens)"),
    ("/v1/abort", {}, "request_id"),
    ("/v1/abort", {"request_id": "x" * 300}, "<= 256"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), OTHERS, ids=[str(number) for number in range(len(OTHERS))])
def test_bad_input_of_the_other_apis(api: LocalApi, path: str, body: Any, words: str) -> None:
    status, answer = api.post(path, body)
    assert status == 400, answer
    if path.startswith(ANTHROPIC):
        assert set(answer) == {"type", "error"} and set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error" and words in answer["error"]["message"]
    assert api.sent == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text"),
        ({"max_output_tokens": 10**8}, "max_output_tokens"),
        ({"chat_template_kwargs": {"divisor": 0}}, "input"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)
def test_the_parameter_at_fault_has_the_name_that_the_client_gave_it(
    api: LocalApi, body: dict[str, Any], param: str
) -> None:
    assert api.post(RESPONSES, {"input": "x"} | body)[1]["error"]["param"] == param


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "type", "function", "name", "tool_calls", "text", "schema", "format",
                                       "input_schema", "parameters", "properties", "enum"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.sampled_from(["messages", "temperature", "stop", "stream", "tools", "logit_bias", "seed", "max_tokens", "x", "input",
                        "chat_template_kwargs", "tool_choice", "stream_options", "n", "response_format", "system", "thinking",
                        "instructions", "text", "reasoning", "output_config", "include", "stop_sequences", "prompt", "echo"]
)  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETION: {"prompt": "x"},
    ANTHROPIC: {"messages": USER, "max_tokens": 5},
    COUNT: {"messages": USER},
    RESPONSES: {"input": "x"},
}


@settings(max_examples=100, deadline=None)
@given(body=st.dictionaries(KEYS, VALUES), path=st.sampled_from(sorted(WHOLE)))
def test_no_body_makes_a_server_error(api: LocalApi, body: Any, path: str) -> None:
    api.answers = [ScriptedAnswer(blocks("Hello"))]
    for content in (body, WHOLE[path] | body):
        status, answer = api.post(path, content)
        assert status in (200, 400), answer
        assert status == 200 or "message" in answer["error"]
