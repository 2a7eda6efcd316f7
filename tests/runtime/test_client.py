"""The terminal client: timings in words, and one message for whatever a server sends."""

import io
import json

import httpx
import pytest

from duovolt.checkpoint.errors import CheckFailed, DuovoltError
from duovolt.cli.main import main
from duovolt.runtime.proxy.client import ChatClient, Timings, answer, converse, describe


@pytest.mark.parametrize(
    "speed, proposed, accepted, words",
    [
        (47.31, 30, 24, "first token after 1,234 ms, then 47.3 tok/s, 24 of 30 drafts accepted"),
        (None, 0, 0, "first token after 1,234 ms"),
    ],
)
def test_timings_in_words(speed: float | None, proposed: int, accepted: int, words: str) -> None:
    assert describe(Timings(1234.4, speed, proposed, accepted)) == words


STRANGE = [
    ("nope", "no piece of a chat answer"),
    ("[]", "Expected `object`, got `array`"),
    ("{}", "missing required field `choices`"),
    ("5", "Expected `object`, got `int`"),
    ("", "no piece of a chat answer"),
    ("[" * 100_000, "no piece of a chat answer"),
    ('{"choices": null}', "Expected `array`, got `null`"),
    ('{"choices": [{}]}', "missing required field `delta`"),
    ('{"choices": [{"delta": null}]}', "Expected `object`, got `null`"),
    ('{"choices": [{"delta": {"content": 5}}]}', "got `int`"),
    ('{"choices": [{"delta": {"content": "\\ud800"}}]}', "no piece of a chat answer"),
    ('{"choices": [{"delta": {}, "finish_reason": 1}]}', "got `int`"),
    ('{"choices": [], "duovolt": {}}', "missing required field `prompt_ms`"),
    ('{"error": "x"}', "the server broke the answer off: x"),
    ('{"error": {"message": "why"}}', "the server broke the answer off: why"),
    ('{"error": {"message": 5}}', "the server broke the answer off: {'message': 5}"),
    ('{"error": null}', "missing required field `choices`"),
    ('{"choices": []}', "the answer ended without a reason"),
    ('{"choices": [{"delta": {"content": null}}]}', "the answer ended without a reason"),
]


@pytest.mark.parametrize(("event", "words"), STRANGE, ids=[str(number) for number in range(len(STRANGE))])
def test_a_server_that_sends_something_else_is_one_message(event: str, words: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        answer(against(200, f"data: {event}\n\n"), [], quiet=True)
    assert failure.value.exit_code == 1
    assert words in str(failure.value) and len(str(failure.value)) < 500


@pytest.mark.parametrize(
    ("status", "body", "words", "code"),
    [
        (400, '{"error": {"message": "why"}}', "the server answered 400: why", 2),
        (404, '{"error": "x"}', "the server answered 404: x", 2),
        (500, "[" * 100_000, "the server answered 500: [[[", 1),
        (502, "[]", "the server answered 502: []", 1),
        (403, '{"detail": "no"}', 'the server answered 403: {"detail": "no"}', 2),
    ],
)
def test_refusals_in_any_shape_are_one_message(status: int, body: str, words: str, code: int) -> None:
    with pytest.raises(DuovoltError) as failure:
        answer(against(status, body), [], quiet=True)
    assert words in str(failure.value)
    assert failure.value.exit_code == code


@pytest.mark.parametrize(("terminal", "code"), [(True, 0), (False, 1)])
def test_a_conversation_outlives_an_answer_that_broke_off(
    terminal: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its question is forgotten; the next one follows what came before."""
    piece = 'data: {"choices": [{"delta": {"content": "hello"}%s}]}\n\n'
    whole = piece % ', "finish_reason": "stop"'
    replies = [
        httpx.Response(200, text=whole),
        httpx.Response(200, text=piece % "" + 'data: {"error": {"message": "rank 1 was killed."}}\n\n'),
        httpx.Response(503, text='{"error": {"message": "the ranks are not ready"}}'),
        httpx.Response(200, text=whole),
    ]
    asked: list[list[str]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append([message["content"] for message in json.loads(request.content)["messages"]])
        return replies[len(asked) - 1]

    client = ChatClient("http://server", None, {})
    client._http = httpx.Client(transport=httpx.MockTransport(reply), base_url="http://server")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\nfour\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
    assert converse(client, None, None, quiet=True) == code
    said = capsys.readouterr()
    assert said.out.replace("> ", "") == "hello\n" * 3
    assert said.err == (
        "duovolt: the server broke the answer off: rank 1 was killed.\n"
        "duovolt: the server answered 503: the ranks are not ready\n"
    )
    before = ["one", "hello"]
    assert asked == [["one"], [*before, "two"], [*before, "three"], [*before, "four"]]


def against(status: int, body: str) -> ChatClient:
    """A client whose server always answers the same."""
    client = ChatClient("http://server", None, {})
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
    client._http = httpx.Client(transport=transport, base_url="http://server")
    return client


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://server", "server"])
@pytest.mark.parametrize("command", [["chat", "--once", "hello"], ["eval"], ["bench", "serve"]])
def test_an_address_without_its_protocol_is_the_users_mistake(
    command: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--url", url]) == 2
    error = capsys.readouterr().err
    assert f"--url {url}: begin it with http:// or https://" in error and error.count("\n") == 1
