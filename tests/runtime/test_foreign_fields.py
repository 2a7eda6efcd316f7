"""Fields that the official clients know: each is read here, or listed as harmless, or refused with 400 and its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from duovolt.runtime.messages import GenerateRequest
from duovolt.runtime.proxy.errors import ApiError
from duovolt.runtime.proxy.foreign import RULES, refuse_unheeded
from duovolt.runtime.proxy.foreign_fields import EMPTY_ASKS, HARMLESS, LENGTHS, REFUSED
from duovolt.runtime.proxy.schema import (
    Body,
    ChatBody,
    CompletionBody,
    CountTokensBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    decode_body,
)

from .local_api import LocalApi
from .stub_model import blocks, make_ranks, write_script

USER = [{"role": "user", "content": "hi"}]
GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"
LEAST: dict[type[Body], tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", {"messages": USER}),
    CompletionBody: ("/v1/completions", {"prompt": "hi"}),
    ResponsesBody: ("/v1/responses", {"input": "hi"}),
    MessagesBody: ("/v1/messages", {"messages": USER, "max_tokens": 50}),
    CountTokensBody: ("/v1/messages/count_tokens", {"messages": USER}),
    TokenizeBody: ("/tokenize", {"messages": USER}),
}
ANSWERING = [kind for kind in LEAST if kind not in (CountTokensBody, TokenizeBody)]
OFFICIAL: list[tuple[type[Body], Any]] = [
    (ChatBody, chat_create_params.CompletionCreateParamsStreaming),
    (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
    (ResponsesBody, response_create_params.ResponseCreateParamsStreaming),
    (MessagesBody, message_create_params.MessageCreateParamsStreaming),
    (MessagesBody, beta_message_create_params.MessageCreateParamsStreaming),
    (CountTokensBody, message_count_tokens_params.MessageCountTokensParams),
]
# What asks for something, of each official field that is refused.
ASKING: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"], "functions": [{"name": "f"}],
    "function_call": {"name": "f"}, "verbosity": "low", "web_search_options": {"search_context_size": "low"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "container": "c1",
    "mcp_servers": [{"url": "https://x", "name": "x", "type": "url"}], "compaction": {"type": "compaction"},
    "thread": {"type": "create"},
}  # fmt: skip


def fields(params: Any) -> set[str]:
    """All that a client's TypedDict lists, its bases' included."""
    found = set(params.__required_keys__) | set(params.__optional_keys__)
    assert found
    return found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("foreign")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Hello")})
    return LocalApi(make_ranks(folder / "ranks", 1), script, max_context=1000)


def check(kind: type[Body], **more: Any) -> ApiError | None:
    raw = msgspec.json.encode(LEAST[kind][1] | more)
    body = decode_body(raw, kind)
    try:
        refuse_unheeded(raw, body)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(("kind", "params"), OFFICIAL)
def test_every_official_field_is_read_harmless_or_refused(kind: type[Body], params: Any) -> None:
    own, listed = set(kind.__struct_fields__), fields(params)
    assert not (strangers := listed - own - HARMLESS - set(REFUSED)), f"{sorted(strangers)}: which of the three?"
    for name in listed & set(REFUSED) - own:
        error = check(kind, **{name: ASKING[name]})
        if kind is CountTokensBody and name == "compaction":
            continue
        assert error is not None and (error.status, error.param) == (400, name) and name in error.message


def test_the_three_kinds_are_apart_and_the_guide_lists_the_harmless() -> None:
    assert not HARMLESS & set(REFUSED)
    told = GUIDE.read_text(encoding="utf-8").partition("## Fields that change nothing")[2].partition("\n## ")[0]
    assert not (missing := sorted(name for name in HARMLESS if f"`{name}`" not in told)), missing


@pytest.mark.parametrize("kind", ANSWERING)
def test_a_refusal_names_the_field_over_http(api: LocalApi, kind: type[Body]) -> None:
    path, least = LEAST[kind]
    status, answer = api.post(path, least | {"min_tokens": 5})
    assert status == 400 and "min_tokens is not honoured here" in answer["error"]["message"]
    if kind is not MessagesBody:
        assert answer["error"]["param"] == "min_tokens"


def test_what_another_api_knows_is_refused_where_it_is_unknown() -> None:
    for kind, name, value in (
        (ChatBody, "best_of", 3), (ChatBody, "echo", True), (ChatBody, "system", "Be brief."), (ChatBody, "max_output_tokens", 5),
        (CompletionBody, "tools", [{"type": "function"}]), (CompletionBody, "max_output_tokens", 5),
        (ResponsesBody, "n", 2), (ResponsesBody, "presence_penalty", 1), (ResponsesBody, "stop_token_ids", [5]),
        (ResponsesBody, "max_tokens", 5), (MessagesBody, "stop", ["x"]), (MessagesBody, "text", {"verbosity": "low"}),
        (MessagesBody, "n", 2), (MessagesBody, "logit_bias", {"5": 1}), (CountTokensBody, "thread", {"type": "create"}),
        (TokenizeBody, "add_generation_prompt", False), (TokenizeBody, "enable_thinking", False),
    ):  # fmt: skip
        error = check(kind, **{name: value})
        assert error is not None and error.param == name, (kind, name)


@pytest.mark.parametrize("kind", LEAST)
def test_what_asks_for_nothing_is_no_reason_to_refuse(kind: type[Body]) -> None:
    """Clients send whole forms: null, empty values, and the values that mean the usual thing."""
    for name, rule in REFUSED.items():
        for value in (None, "", [], {}, *RULES[kind].get(name, rule).usual):
            if value == {} and name in EMPTY_ASKS:
                continue
            assert check(kind, **{name: value}) is None, (name, value)
    for name, value in (
        ("best_of", 1),
        ("n", 1),
        ("echo", False),
        ("presence_penalty", 0.0),
        ("truncation", "disabled"),
    ):
        assert check(kind, **{name: value}) is None, name
    keeping = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert check(kind, context_management=keeping) is None and check(kind, context_management={"edits": []}) is None
    assert check(kind, quite_unheard_of=7) is None


def test_what_is_so_anyway_is_granted() -> None:
    """Benchmarks ask for a least length together with `ignore_eos`, which gives them the whole of `max_tokens`."""
    for kind in ANSWERING:
        assert (
            check(kind, min_tokens=5, ignore_eos=True) is None
            and check(kind, min_tokens=5, ignore_eos=False) is not None
        )


def test_both_names_of_a_length_may_be_sent_if_they_agree(api: LocalApi) -> None:
    for kind in (ChatBody, CompletionBody):
        path, least = LEAST[kind]
        for names in (["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]):
            assert api.say(blocks("Hello"), path, least | dict.fromkeys(names, 3))[0] == 200
            assert [one.max_tokens for one in api.sent if isinstance(one, GenerateRequest)] == [3]
        status, answer = api.post(path, least | {"max_tokens": 3, "max_completion_tokens": 4})
        assert status == 400 and "max_tokens is 3, max_completion_tokens 4" in answer["error"]["message"]


def test_an_empty_object_may_be_the_request() -> None:
    """A search with nothing chosen is a search; the empty schema is that of any JSON."""
    for kind in ANSWERING:
        for name in ("web_search_options", "guided_json", "json_schema"):
            assert (error := check(kind, **{name: {}})) is not None and error.param == name
            assert check(kind, **{name: None}) is None
        assert (error := check(kind, prompt_logprobs=0)) is not None and error.param == "prompt_logprobs"


_PATHS = {path: kind for kind, (path, _) in LEAST.items()}


@pytest.mark.parametrize("kind", RULES)
def test_advice_names_fields_that_the_api_has(kind: type[Body]) -> None:
    """`say X`: of the API that was asked, or of the path that is named; and a sentence in either case."""
    said = 0
    for name, rule in RULES[kind].items():
        told = rule.told(kind)
        assert told.endswith((", or leave it out", "; leave it out")) and "{" not in told, (name, told)
        advice = re.search(
            r"(?:say|say it in|use /v1/completions with) ((?:[a-z_.]+(?:, | or | and | with )?)+)(?: to (/\S+))?$",
            re.sub("(, or|;) leave it out$", "", told),
        )
        if advice is None:
            assert "say " not in told, (name, told)
            continue
        there = _PATHS[advice[2]] if advice[2] else CompletionBody if "use /v1/completions" in told else kind
        for word in re.split(", | or | and | with ", advice[1]):
            assert word.partition(".")[0] in there.__struct_fields__, (name, told)
            said += 1
    assert said > 20 or kind in (CountTokensBody, TokenizeBody)


def test_advice_by_api() -> None:
    for kind, name, value, told in (
        (CompletionBody, "enable_thinking", False, "say reasoning_effort or enable_thinking to /v1/chat/completions, or"),
        (CompletionBody, "reasoning_effort", "low", "say reasoning_effort to /v1/chat/completions, or"),
        (CompletionBody, "system", "Be brief.", "put it into the prompt, or"),
        (CompletionBody, "functions", [{"name": "f"}], "say tools to /v1/chat/completions, or"),
        (MessagesBody, "enable_thinking", False, "say thinking, or"),
        (MessagesBody, "guided_json", {"type": "object"}, "say output_config.format, or"),
        (ResponsesBody, "guided_json", {"type": "object"}, "say text.format, or"),
        (ResponsesBody, "max_new_tokens", 5, "say max_output_tokens, or"),
        (ResponsesBody, "system", "Be brief.", "say instructions, or"),
        (ResponsesBody, "logit_bias", {"5": 1}, "this API has no such field;"),
        (ChatBody, "system", "Be brief.", "send it as a message of the role system, or"),
        (ChatBody, "early_stopping", True, "answers are sampled;"),
        (TokenizeBody, "enable_thinking", False, "say it in chat_template_kwargs, or"),
    ):  # fmt: skip
        error = check(kind, **{name: value})
        assert error is not None and error.message == f"{name} is not honoured here: {told} leave it out"


def test_a_length_may_be_said_twice() -> None:
    """Some clients send the length by every name that they know."""
    for kind, own in (
        (ChatBody, "max_tokens"), (ChatBody, "max_completion_tokens"), (CompletionBody, "max_tokens"),
        (MessagesBody, "max_tokens"), (ResponsesBody, "max_output_tokens"),
    ):  # fmt: skip
        for name in set(LENGTHS) - set(kind.__struct_fields__):
            assert check(kind, **{own: 7, name: 7}) is None, (kind, name)
            for other in (8, True, "7", 1):
                error = check(kind, **{own: 7, name: other})
                assert error is not None and error.param == name, (kind, name, other)
    assert check(ChatBody, n_predict=-1) is None and check(CompletionBody, n_predict=-1) is not None


def test_true_is_not_one_to_json() -> None:
    for name, value in (("length_penalty", True), ("min_tokens", False), ("continue_final_message", 0)):
        assert (error := check(ChatBody, **{name: value})) is not None and error.param == name


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(LEAST)),
    some=st.dictionaries(
        st.sampled_from(sorted(HARMLESS - {"include", "metadata", "model", "store", "stream", "stream_options"})),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
        max_size=4,
    ),
)
def test_harmless_fields_change_no_answer(api: LocalApi, kind: type[Body], some: dict[str, Any]) -> None:
    path, least = LEAST[kind]
    sent = []
    for body in (least, least | some):
        body = body | {"seed": 3} if kind in ANSWERING else body
        status, answer = api.say(blocks("Hello"), path, body)
        assert status == 200, answer
        sent.append(
            [(one.prompt, one.sampling, one.max_tokens) for one in api.sent if isinstance(one, GenerateRequest)]
        )
        sent[-1] += [answer.get("input_tokens"), answer.get("tokens")]
    assert sent[0] == sent[1]
