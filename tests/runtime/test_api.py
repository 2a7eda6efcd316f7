"""The HTTP APIs: OpenAI's shapes, and one meaning for stream and body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.messages import CancelRequest, GenerateRequest, SamplingParams
from duovolt.runtime.proxy.apis.chat import ChatShape
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.rank.scripted import ScriptedAnswer
from duovolt.runtime.rank.wire import decode_to_rank, encode

from .local_api import LocalApi
from .stub_model import blocks, byte_ids, ids, make_ranks, write_script

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CONTEXT = 1000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("api")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Hello")})
    return LocalApi(make_ranks(folder / "ranks", 2), script, max_context=CONTEXT, max_waiting=2)


def say(api: LocalApi, answer: str | list[list[int]], path: str = CHAT, /, **body: Any) -> tuple[int, Any]:
    api.answers = [ScriptedAnswer(blocks(answer) if isinstance(answer, str) else answer)]
    start = {"messages": USER} if path == CHAT else {"prompt": "once"}
    return api.post(path, start | body)


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def joined(events: list[Any]) -> dict[str, Any]:
    """A chat stream put together, its shape checked on the way."""
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "usage": None}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["model"]) == (chunks[0]["id"], chunks[0]["model"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    found["calls"].append(call | {"function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"}
                    found["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"]:
                assert "finish" not in found
                found["finish"] = choice["finish_reason"]
    return found


def test_a_whole_answer_has_openais_shape(api: LocalApi) -> None:
    status, body = say(api, "I think.\n</think>\n\nHello world", max_tokens=50)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "ranks"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "reasoning_content": "I think."}
    assert choice["finish_reason"] == "stop"
    prompt = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"))
    answer = len(ids("I think.\n</think>\n\nHello world<|im_end|>"))
    assert counts(body["usage"]) == (prompt, answer, prompt + answer)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(ids("I think.\n</think>"))}
    assert body["duovolt"]["drafts_proposed"] == body["duovolt"]["drafts_accepted"] == 0
    assert [type(message).__name__ for message in api.sent] == [
        "GenerateRequest"
    ]  # nobody is told to stop a finished one


ANSWERS = st.sampled_from(
    [
        "Hello world",
        "a\n</think>\n\nb €😀 beta gamma c",
        f"x</think>{CALL}\n{CALL}",
        f"x</think>{CALL[:30]}",
        "y",
        "</think>",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    answer=ANSWERS,
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    tools=st.booleans(),
    stop=st.sampled_from([None, "beta gamma", ["\n", "zzz"]]),
    limit=st.sampled_from([None, 3, 11]),
    logprobs=st.booleans(),
)
def test_stream_and_body_and_any_cut_say_the_same(
    api: LocalApi, answer: str, cuts: list[int], tools: bool, stop: Any, limit: int | None, logprobs: bool
) -> None:
    tokens, cut, position = ids(answer + "<|im_end|>"), [], 0
    for size in cuts * len(tokens):
        if position < len(tokens):
            cut.append(tokens[position : position + size])
            position += size
    options: dict[str, Any] = {"stop": stop, "max_tokens": limit, "logprobs": logprobs}
    options |= {"tools": TOOLS} if tools else {}
    _, whole = say(api, [tokens], **options)
    _, other = say(api, cut, **options)
    _, events = say(api, cut, stream=True, stream_options={"include_usage": True}, **options)
    for body in (whole, other):
        for call in body["choices"][0]["message"].get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    assert other["choices"] == whole["choices"]
    assert other["usage"] == whole["usage"]
    stream = joined(events)
    (choice,) = whole["choices"]
    assert stream["content"] == (choice["message"]["content"] or "")
    assert stream["reasoning"] == choice["message"].get("reasoning_content", "")
    assert stream["finish"] == choice["finish_reason"]
    assert stream["logprobs"] == ((choice["logprobs"] or {}).get("content", []))
    assert events[-2]["usage"] == whole["usage"]
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"] for call in stream["calls"]] == [call["function"] for call in calls]
    assert [call["index"] for call in stream["calls"]] == list(range(len(calls)))


def test_usage_comes_once_at_the_end_if_asked_for(api: LocalApi) -> None:
    """A04."""
    _, events = say(api, "a</think>b", stream=True, stream_options={"include_usage": True})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 4
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    _, plain = say(api, "a</think>b", stream=True)
    assert all("usage" not in event and event["choices"] for event in plain[:-1])


def test_parallel_calls_keep_id_and_name_and_finish_with_tool_calls(api: LocalApi) -> None:
    """A07 A08."""
    _, body = say(api, f"t</think>{CALL}\n{CALL}", tools=TOOLS)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    _, unused = say(api, "t</think>no", tools=TOOLS)
    assert unused["choices"][0]["finish_reason"] == "stop"
    _, forbidden = say(api, f"t</think>{CALL}", tools=TOOLS, tool_choice="none")
    assert forbidden["choices"][0]["message"]["content"] == CALL


def test_calls_with_lone_surrogates_reach_the_client_streamed_and_whole(api: LocalApi) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
    _, body = say(api, f"t</think>{call}", tools=TOOLS)
    _, events = say(api, f"t</think>{call}", tools=TOOLS, stream=True)
    for calls in (body["choices"][0]["message"]["tool_calls"], joined(events)["calls"]):
        assert [one["function"] for one in calls] == [{"name": "add", "arguments": '{"a": "\ufffd"}'}]


@pytest.mark.parametrize("place", ["opening", "events", "closing"])
def test_a_stream_that_fails_inside_says_so_and_cancels(
    api: LocalApi, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """A14."""
    monkeypatch.setattr(ChatShape, place, lambda *_: 1 // 0)
    _, events = say(api, "t</think>Hello world", stream=True)
    error = events[-1]["error"]
    assert (error["message"], error["type"]) == ("internal error; the server's log has it", "server_error")
    assert "[DONE]" not in events
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert api.hub.open_count == 0


def test_a_stop_string_ends_the_work_of_the_ranks_too(api: LocalApi) -> None:
    """A05."""
    status, body = say(api, "t</think>one beta gamma two", stop="beta gamma")
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert [type(message).__name__ for message in api.sent] == ["GenerateRequest", "CancelRequest"]
    assert api.hub.counters.finished == 1
    assert api.hub.counters.cancelled == 0
    assert api.hub.open_count == 0


def test_thinking_is_switched_by_template_variables(api: LocalApi) -> None:
    for off in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled"}, "enable_thinking": False, "reasoning": {"enabled": False, "effort": None}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
        {"reasoning": {"effort": "none", "enabled": False}},
        {"reasoning": {"effort": "high", "enabled": False}},
    ):
        _, body = say(api, "Hello", **off)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    on = {"chat_template_kwargs": {"enable_thinking": False}}
    for more in (
        {},
        {"reasoning": {"effort": "high", "summary": "auto", "exclude": False}},
        {"thinking": {"type": "adaptive"}},
        on | {"thinking": {"type": "enabled", "budget_tokens": 100}},
        on | {"reasoning": {"enabled": True}},
    ):
        _, body = say(api, "Hello", **more)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hello"}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"thinking": {"type": "off"}}, "thinking", "thinking.type: 'off' is not one of"),
        ({"reasoning": {"effort": 3}}, "reasoning", "reasoning.effort: expected a text"),
        ({"reasoning": {"enabled": "no"}}, "reasoning", "reasoning.enabled: expected true or false"),
        ({"reasoning": {"exclude": True}}, "reasoning", "reasoning.exclude is not honoured here"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking", "say different things"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning", "say different things"),
        (
            {"reasoning": {"effort": "none", "enabled": True}},
            "reasoning",
            "reasoning.enabled and reasoning.effort: they say",
        ),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            "reasoning_effort",
            "enable_thinking and reasoning_effort: they",
        ),
        (
            {"reasoning_effort": "none", "thinking": {"type": "enabled"}},
            "reasoning_effort",
            "thinking.type and reasoning",
        ),
    ],
)
def test_thinking_that_is_not_clear_is_refused(api: LocalApi, fields: dict[str, Any], param: str, told: str) -> None:
    status, body = say(api, "Hello", **fields)
    assert (status, body["error"]["param"]) == (400, param) and told in body["error"]["message"]


def test_characters_cut_over_tokens_arrive_whole(api: LocalApi) -> None:
    """A06."""
    tokens = ids("</think>") + byte_ids("😀한글€".encode())
    _, events = say(api, [[token] for token in tokens], stream=True)
    contents = [event["choices"][0]["delta"].get("content") for event in events[1:-2]]
    assert contents == ["😀", "한", "글", "€"]


def test_completions_take_text_or_ids_and_echo(api: LocalApi) -> None:
    _, body = say(api, "Hello<think>", COMPLETION, echo=True)
    assert body["object"] == "text_completion"
    assert body["choices"][0] == {"index": 0, "text": "onceHello<think>", "logprobs": None, "finish_reason": "stop"}
    _, same = say(api, "Hello", COMPLETION, prompt=ids("once"))
    assert same["choices"][0]["text"] == "Hello"
    assert api.sent[0].prompt == ids("once")  # type: ignore[union-attr]
    _, nested = say(api, "Hello", COMPLETION, prompt=[ids("once")])
    assert nested["usage"] == same["usage"]
    _, events = say(api, "Hello world", COMPLETION, stream=True, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "onceHello world"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_prompt_that_fills_the_context_can_be_echoed_and_nothing_more(api: LocalApi) -> None:
    full = [5] * CONTEXT
    status, body = say(api, "Hello", COMPLETION, prompt=full, max_tokens=0, echo=True)
    assert status == 200
    assert counts(body["usage"]) == (CONTEXT, 0, CONTEXT)
    assert body["choices"][0]["text"] == api.plan.tokenizer.decode(full)
    assert body["choices"][0]["finish_reason"] == "length"
    for prompt, asked in ((full, 1), (full, None), ([5, *full], 0)):
        status, body = say(api, "Hello", COMPLETION, prompt=prompt, max_tokens=asked, echo=True)
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert f"context is {CONTEXT} tokens; the request has {len(prompt)}" in body["error"]["message"]
    status, body = say(api, "Hello", COMPLETION, prompt=full[1:], max_tokens=2)
    assert (status, body["error"]["param"]) == (400, "max_tokens")


def test_minus_one_asks_for_as_many_tokens_as_fit(api: LocalApi) -> None:
    """As llama.cpp's server and LM Studio have it; also where another name says it again."""
    for name in ("max_tokens", "max_completion_tokens"):
        _, body = say(api, "</think>Hello", **{name: -1}, n_predict=-1)
        assert api.sent[0].max_tokens == CONTEXT - body["usage"]["prompt_tokens"]  # type: ignore[union-attr]
        say(api, "Hello", COMPLETION, prompt=[5] * 7, **{name: -1}, n_predict=-1)
        assert api.sent[0].max_tokens == CONTEXT - 7  # type: ignore[union-attr]
    say(api, "Hello", COMPLETION, prompt=[5] * 7)
    assert api.sent[0].max_tokens == 16  # type: ignore[union-attr]
    assert say(api, "Hello", max_tokens=-2)[0] == 400


def test_completion_logprobs_have_one_entry_a_token(api: LocalApi) -> None:
    _, body = say(api, "Hello world", COMPLETION, logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " world", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [0.0, 0.0, 0.0]
    assert logprobs["text_offset"] == [0, 5, 11]
    assert logprobs["top_logprobs"][1] == {" world": 0.0}
    assert api.sent[0].sampling.logprobs == 2  # type: ignore[union-attr]


def test_chat_logprobs_tell_token_and_bytes(api: LocalApi) -> None:
    _, body = say(api, "</think>€", logprobs=True, top_logprobs=1)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries[1:4]] == [[byte] for byte in "€".encode()]
    assert entries[0]["token"] == "</think>"
    assert entries[0]["top_logprobs"] == [{"token": "</think>", "logprob": 0.0, "bytes": list(b"</think>")}]


def test_sampling_fields_reach_the_engine_and_seeds_are_fixed(api: LocalApi) -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5,
              "presence_penalty": -1, "frequency_penalty": 2, "seed": -3, "logit_bias": {"5": -100},
              "ignore_eos": True, "stop_token_ids": [3]}  # fmt: skip
    say(api, "x", max_completion_tokens=9, **fields)
    request = api.sent[0]
    assert not isinstance(request, CancelRequest)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1, 2)
    assert (sampling.seed, sampling.logit_bias, request.ignore_eos) == (2**64 - 3, {5: -100.0}, True)
    assert (request.max_tokens, request.stop_ids) == (9, [*ids("<|im_end|>"), 3])
    seeds = set()
    for _ in range(5):
        say(api, "x")
        seeds.add(api.sent[0].sampling.seed)  # type: ignore[union-attr]
    assert len(seeds) == 5


def test_the_ranks_hear_of_stop_ids_that_can_come_the_models_own_first(api: LocalApi) -> None:
    asked = [5, 3, *range(api.plan.tokenizer.size, api.plan.tokenizer.size + 9), 2**31 - 1, 3]
    api.say(blocks("Hello"), "/v1/completions", {"prompt": "x", "stop_token_ids": asked})
    assert isinstance(api.sent[0], GenerateRequest)
    assert api.sent[0].stop_ids == [*api.plan.tokenizer.stop_ids, 3, 5]


def test_the_largest_numbers_allowed_can_be_sent_to_the_ranks(api: LocalApi) -> None:
    for seed in (2**64 - 1, -(2**63)):
        status, _ = say(api, "Hello", stop_token_ids=[2**31 - 1], top_k=2**31 - 1, seed=seed)
        assert status == 200
        (sent,) = api.sent
        assert decode_to_rank(encode(sent)) == sent
        assert sent.sampling.seed == seed % 2**64  # type: ignore[union-attr]


def test_a_send_that_raises_leaves_nothing_open() -> None:
    hub = Hub(lanes=1, max_waiting=0)

    def refuse(message: GenerateRequest | CancelRequest) -> None:
        raise OverflowError("too large for the wire")

    request = GenerateRequest(0, [1], 1, [], False, SamplingParams())
    hub.send = refuse
    for _ in range(3):
        with pytest.raises(OverflowError, match="too large for the wire"):
            hub.submit([request])
        assert (hub.open_count, hub.counters.requests, hub.counters.prompt_tokens) == (0, 0, 0)
    sent: list[Any] = []
    hub.send = sent.append
    (opened,) = hub.submit([request])
    assert opened.request is sent[0]
    assert (hub.open_count, hub.counters.requests) == (1, 1)


def test_the_model_is_called_what_its_owner_calls_it(tmp_path: Path) -> None:
    """In the list, by its name in a path, and in answers; whatever a request calls it."""
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    api = LocalApi(make_ranks(tmp_path / "ranks", 1), script, served_model_name="team/our-model")
    assert [one["id"] for one in api.request("GET", "/v1/models").json()["data"]] == ["team/our-model"]
    assert api.request("GET", "/v1/models/team/our-model").json()["id"] == "team/our-model"
    assert api.request("GET", "/v1/models/ranks").status_code == 404
    _, body = say(api, "Hello", COMPLETION, model="another")
    assert (body["model"], body["choices"][0]["text"]) == ("team/our-model", "Hello")


def test_key_models_tokenize_page_and_metrics(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    (tmp_path / "key").write_text("secret\n")
    api = LocalApi(make_ranks(tmp_path / "ranks", 1), script, api_key_file=tmp_path / "key", drafts=2)
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer sécret".encode("latin-1").decode("latin-1")},
    ):
        response = api.request("GET", "/v1/models", headers={k: v.encode("latin-1") for k, v in headers.items()})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer secret"}
    assert api.request("GET", "/v1/models", headers={"Authorization": "bearer  secret"}).status_code == 200
    model = api.request("GET", "/v1/models", headers=good).json()["data"][0]
    assert model["id"] == "ranks"
    assert model["duovolt"]["conversion_id"] == "none"
    assert (model["duovolt"]["ranks"], model["duovolt"]["drafts"]) == (1, 2)
    assert model["max_model_len"] == 32768
    status, body = api.post("/tokenize", {"prompt": "Hello world"}, **good)
    assert (status, body["tokens"]) == (200, ids("Hello world"))
    _, body = api.post("/tokenize", {"messages": USER}, **good)
    assert body["tokens"] == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    _, body = api.post("/detokenize", {"tokens": ids("a €<think>")}, **good)
    assert body == {"prompt": "a €<think>"}
    page = api.request("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text  # nothing is fetched from elsewhere
    metrics = api.request("GET", "/metrics").text
    assert "# TYPE duovolt_requests_total counter\nduovolt_requests_total 0.0\n" in metrics
    assert json.loads(api.request("GET", "/health/ready").text)["ready"] is True
