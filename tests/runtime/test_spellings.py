"""One request in the ways in which clients, proxies and shells spell it; what is no request at all; paths that are nearly one."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import Server, running
from .stub_model import blocks, make_ranks, write_script

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("spellings")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("</think>\n\nHello", 2)})
    yield from running(make_ranks(folder / "ranks", 1), "--backend", f"scripted:{script}")


def exchange(server: Server, raw: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of what comes back until the server closes."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(raw)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)


def ask(server: Server, target: str, body: bytes = BODY, *headers: str, verb: str = "POST") -> tuple[int, Any]:
    lines = [f"{verb} {target} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers]
    status, _, answer = exchange(server, "\r\n".join([*lines, "", ""]).encode() + body)
    return status, answer


@pytest.mark.parametrize(
    "target",
    [
        CHAT,
        CHAT + "/",
        CHAT + "//",
        CHAT + "?a=b",
        f"http://127.0.0.1{CHAT}",
        f"https://elsewhere:8000{CHAT}/",
        f"HTTP://x{CHAT}",
    ],
)
def test_a_path_is_answered_in_every_spelling_without_a_redirect(server: Server, target: str) -> None:
    status, answer = ask(server, target)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello")


def test_the_list_of_models_with_a_slash_behind_it_is_no_model(server: Server) -> None:
    for target in ("/v1/models", "/v1/models/", "http://x/v1/models"):
        status, answer = ask(server, target, b"", verb="GET")
        assert (status, answer["object"]) == (200, "list")


@pytest.mark.parametrize("target", ["http://x/v1/models%3fa", "http://x/v1/models%23a", "http://x/v1/mo%0Adels"])
def test_what_a_path_holds_in_percents_belongs_to_it(server: Server, target: str) -> None:
    """As in the usual form of a target: a proxy that judges paths must not be shown another than the one answered."""
    assert ask(server, target, b"", verb="GET")[0] == 404


def test_a_bom_is_no_part_of_a_body(server: Server) -> None:
    assert ask(server, CHAT, b"\xef\xbb\xbf" + BODY)[0] == 200


@pytest.mark.parametrize("coding, body", [("gzip", gzip.compress(BODY)), ("snappy", BODY), ("gzip, br", BODY)])
@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/tokenize"])
def test_a_compressed_body_is_refused_as_one(server: Server, target: str, coding: str, body: bytes) -> None:
    status, answer = ask(server, target, body, f"Content-Encoding: {coding}")
    assert status == 415
    assert answer["error"]["message"] == f"Content-Encoding {coding!r}: send the body as it is, not compressed"


def test_identity_is_no_compression(server: Server) -> None:
    assert ask(server, CHAT, BODY, "Content-Encoding: Identity")[0] == 200


@pytest.mark.parametrize(
    "target, meant",
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/embeddings", None),
    ],
)
def test_a_path_beside_one_that_exists_names_it(server: Server, target: str, meant: str | None) -> None:
    status, answer = ask(server, target)
    said = "" if meant is None else f"; {meant} is one: look at the base URL that the client was given"
    assert (status, answer["error"]["message"]) == (404, f"no such path: {target}{said}")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS to a server without
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_request_gets_an_error_in_the_apis_shape(server: Server, raw: bytes) -> None:
    status, headers, answer = exchange(server, raw)
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert answer["error"] == {
        "message": "this is no HTTP/1.1 request, or a malformed one",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_nothing_is_said_into_an_answer_that_has_begun(server: Server) -> None:
    """A client that is answered before its body has come, and then breaks the body, gets one answer."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        first = connection.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"zz\r\n")
        rest = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"HTTP/1.1" not in rest
