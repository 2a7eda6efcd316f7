"""The official SDKs against a real server: sync, async, streamed, with tools; and many clients that come and go."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .conftest import Server, running
from .stub_model import blocks, ids, make_ranks, write_script

USER: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n<parameter=text>\nb €\n</parameter>\n"
    "</function>\n</tool_call>"
)
ANSWER = f"Why.\n</think>\n\nHello world {CALL.format(1)}\n{CALL.format(2)}"
PROMPT = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"))
LENGTH = len(ids(ANSWER + "<|im_end|>"))
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    script = write_script(folder / "script.jsonl", {"blocks": blocks(ANSWER, 3)})
    (folder / "key").write_text("secret")
    yield from running(
        make_ranks(folder / "ranks", 2), "--backend", f"scripted:{script}", "--lanes", "4", "--max-context", "1000",
        "--api-key-file", folder / "key",
    )  # fmt: skip


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0, timeout=20)


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=20)


def check_chat(completion: Any) -> None:
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Why."
    assert choice.message.content == "Hello world "
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": n, "text": "b €"} for n in (1, 2)]
    assert completion.usage.prompt_tokens > PROMPT and completion.usage.completion_tokens == LENGTH


def check_message(message: anthropic.types.Message) -> None:
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert (thinking.thinking, text.text) == ("Why.", "Hello world ")  # type: ignore[union-attr]
    assert thinking.signature  # type: ignore[union-attr]
    assert [call.input for call in calls] == [{"a": n, "text": "b €"} for n in (1, 2)]  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens > PROMPT and message.usage.output_tokens == LENGTH


def check_response(response: Any) -> None:
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "Why."
    assert response.output_text == "Hello world "
    assert [json.loads(item.arguments) for item in response.output[2:]] == [{"a": n, "text": "b €"} for n in (1, 2)]
    assert response.usage.output_tokens == LENGTH
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < LENGTH


def test_openai_chat_whole_streamed_and_async(server: Server) -> None:
    """A04 A07 A08."""
    client = openai_client(server)
    asked: dict[str, Any] = {"model": "any", "messages": USER, "tools": TOOLS}
    check_chat(client.chat.completions.create(**asked))
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds and "content.done" in kinds
    streamed = [json.loads(call.function.arguments) for call in final.choices[0].message.tool_calls or []]
    assert streamed == [{"a": n, "text": "b €"} for n in (1, 2)]
    assert final.usage is not None and final.usage.completion_tokens == LENGTH

    async def both() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as waiting:
            check_chat(await waiting.chat.completions.create(**asked))
            chunks = [chunk async for chunk in await waiting.chat.completions.create(**asked, stream=True)]
        starts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id]
        assert [(call.index, call.function.name) for call in starts] == [(0, "add"), (1, "add")]

    asyncio.run(both())


def test_openai_responses_whole_streamed_and_async(server: Server) -> None:
    client = openai_client(server)
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    asked: dict[str, Any] = {"model": "any", "input": "hi", "tools": tools}
    check_response(client.responses.create(**asked))
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        check_response(stream.get_final_response())
    assert "".join(deltas) == "Hello world "

    async def both() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as waiting:
            check_response(await waiting.responses.create(**asked))
            events = [event async for event in await waiting.responses.create(**asked, stream=True)]
        assert events[-1].type == "response.completed"
        check_response(events[-1].response)

    asyncio.run(both())
    with pytest.raises(openai.BadRequestError, match="keeps no state"):
        client.responses.create(model="any", input="hi", previous_response_id="resp_1")


def test_anthropic_messages_whole_streamed_and_async(server: Server) -> None:
    """A10 A11 A12."""
    client = anthropic_client(server)
    asked: dict[str, Any] = {"model": "any", "messages": USER, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    whole = client.messages.create(**asked, max_tokens=700)
    check_message(whole)
    assert client.messages.count_tokens(**asked).input_tokens == whole.usage.input_tokens
    with client.messages.stream(**asked, max_tokens=700) as stream:
        texts = list(stream.text_stream)
        check_message(stream.get_final_message())
    assert "".join(texts) == "Hello world "
    follow = [
        *USER,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "3"}]},  # type: ignore[union-attr]
    ]
    check_message(client.messages.create(**asked | {"messages": follow}, max_tokens=500))

    async def both() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as waiting:
            check_message(await waiting.messages.create(**asked, max_tokens=700))
            async with waiting.messages.stream(**asked, max_tokens=700) as streamed:
                check_message(await streamed.get_final_message())

    asyncio.run(both())
    assert [model.id for model in client.models.list()] == [openai_client(server).models.list().data[0].id] == ["ranks"]


def test_refusals_have_each_apis_own_shape(server: Server) -> None:
    """A13: too long and too much, with the numbers, in every API; a wrong key."""
    long = "x" * 1000
    with pytest.raises(anthropic.BadRequestError) as refusal:
        anthropic_client(server).messages.create(
            model="any", max_tokens=5, messages=[{"role": "user", "content": long}]
        )
    body: Any = refusal.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "context is 1000 tokens; the request has 10" in body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match="context is 1000 tokens"):
        anthropic_client(server).messages.create(model="any", max_tokens=10**8, messages=USER)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0).messages.create(
            model="any", max_tokens=5, messages=USER
        )
    with pytest.raises(anthropic.BadRequestError, match="reads text only, not image"):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@@@"}}
        anthropic_client(server).messages.create(
            model="any", max_tokens=5, messages=[{"role": "user", "content": [image]}]  # type: ignore[list-item]
        )  # fmt: skip
    client = openai_client(server)
    for call in (
        lambda: client.responses.create(model="any", input=long),
        lambda: client.responses.create(model="any", input="hi", max_output_tokens=10**8),
        lambda: client.chat.completions.create(model="any", messages=[{"role": "user", "content": long}]),
        lambda: client.completions.create(model="any", prompt=long, max_tokens=1),
    ):
        with pytest.raises(openai.BadRequestError, match="context is 1000 tokens") as wrong:
            call()
        assert wrong.value.code == "context_length_exceeded"
    assert server.metric("running") == 0


def test_good_streams_are_never_cancelled(server: Server) -> None:
    """A02: what ends well is never aborted, and the table is empty behind it (of those that leave: test_serve)."""
    before, finished = server.metric("cancelled_total"), server.metric("finished_total")

    async def good(client: httpx.AsyncClient, number: int) -> None:
        path, body = [
            ("/v1/chat/completions", {"messages": USER, "stream": True}),
            ("/v1/messages", {"messages": USER, "max_tokens": 20, "stream": True}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 9, "stream": True}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ][number % 4]
        response = await client.post(path, json=body)
        assert response.status_code == 200 and '"type":"error"' not in response.text

    async def all_of_them() -> None:
        headers = {"x-api-key": "secret"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            for begin in range(0, 200, 20):
                await asyncio.gather(*(good(client, number) for number in range(begin, begin + 20)))

    asyncio.run(all_of_them())
    assert server.metric("finished_total") == finished + 200
    assert server.metric("cancelled_total") == before
    assert server.metric("running") == server.metric("waiting") == 0


def post_raw(server: Server, data: bytes, wait: float = 3.0) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as raw:
        raw.settimeout(wait)
        received = b""
        try:
            raw.sendall(data)
            while piece := raw.recv(65536):
                received += piece
        except OSError:  # reset, or nothing more comes
            pass
        return received


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_huge_body_is_refused_before_it_is_sent(server: Server, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {1 << 30}\r\n\r\n"
    answer = post_raw(server, head.encode())
    assert answer.startswith(b"HTTP/1.1 413")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert str(1 << 30) in error["error"]["message"] and str(32 << 20) in error["error"]["message"]
    assert ("type" in error) == (path == "/v1/messages")


def test_floods_and_halves_hold_nothing_up(server: Server) -> None:
    """A header flood, a body that stops, a client that closes its side at once, one that never reads."""
    flood = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(2000)
    )
    assert post_raw(server, flood + b"\r\n").startswith(b"HTTP/1.1 4")
    body = json.dumps({"messages": USER, "stream": True}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    stuck = [socket.create_connection((host, int(port))) for _ in range(6)]
    for number, raw in enumerate(stuck):
        raw.sendall(head % len(body) + (body[:10] if number % 2 else body))  # half a body; or an answer never read
    stuck[0].shutdown(socket.SHUT_WR)
    started = time.monotonic()
    with server.client() as client:
        for _ in range(3):
            answer = client.post("/v1/chat/completions", json={"messages": USER}, headers={"x-api-key": "secret"})
            assert answer.status_code == 200
    assert time.monotonic() - started < 10
    for raw in stuck:
        raw.close()
    deadline = time.monotonic() + 5
    while server.metric("running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_answer_can_be_aborted_by_its_id(start_server: Any, tmp_path: Any) -> None:
    slow = {"blocks": [[token] for token in ids("</think>" + "x" * 2000)], "delay_ms": 20}
    script = write_script(tmp_path / "script.jsonl", slow)
    server = start_server(
        make_ranks(tmp_path / "ranks", 2), "--backend", f"scripted:{script}", "--max-wait-seconds", "1.5"
    )
    found: dict[str, httpx.Response] = {}

    def ask(name: str, **body: Any) -> None:
        with server.client(60) as client:
            found[name] = client.post(
                "/v1/chat/completions",
                json={"messages": USER, "max_tokens": 1900} | body,
                headers={"X-Request-Id": name},
            )

    threads = [
        threading.Thread(target=ask, args=(name,), kwargs=body)
        for name, body in (("one", {"stream": True}), ("two", {}))
    ]
    threads[0].start()
    deadline = time.monotonic() + 20
    while server.metric("completion_tokens_total") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    threads[1].start()
    threads[1].join(10)  # it has no lane, and gives up
    late = found["two"]
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    assert "1.5 s" in late.json()["error"]["message"] and int(late.headers["retry-after"]) >= 1
    with server.client() as client:
        assert client.post("/v1/abort", json={"request_id": "nobody"}).json()["aborted"] == 0
        assert client.post("/v1/abort", json={"request_id": "chatcmpl-one"}).json() == {
            "request_id": "chatcmpl-one",
            "aborted": 1,
        }
    threads[0].join(10)
    events = [line for line in found["one"].text.split("\n\n") if line]
    assert '"code":"aborted"' in events[-1] and "[DONE]" not in events[-1]
    assert found["one"].headers["x-request-id"] == "one"
    assert server.metric("running") == server.metric("waiting") == 0
    assert server.metric("cancelled_total") == 1
    with server.client() as client:
        assert 'duovolt_answers_total{outcome="expired"} 1' in client.get("/metrics").text
