"""Addresses, proxies and certificates as users and their environment name them: one line, before anything is asked."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from duovolt.checkpoint.address import require_address
from duovolt.checkpoint.errors import InputError
from duovolt.cli.main import main

NO_ADDRESS = {
    f"http://{'a' * 64}.org": "is no name of a host",
    "http://a..b": "is no name of a host",
    "http://": "names no host",
    "http://:80": "names no host",
    "http://server:99999": "Port out of range",
    "http://server:x": "Port could not be cast",
    "http://server:0": "port 0 is nobody's",
    "http://[::1": "Invalid IPv6 URL",
    "http://server?a=b": "the address alone",
    "http://server/v1#c": "the address alone",
    "http://server?": "the address alone",
    "http://server/#": "the address alone",
    "http://server /v1": "a space or a control character",
    "http://server\n": "a space or a control character",
}
COMMANDS = {
    "--url": (["chat", "--once", "hi"], ["eval"], ["bench", "serve"]),
    "--endpoint": (["download", "a/b", "nowhere"],),
}


@pytest.mark.parametrize("url", NO_ADDRESS)
@pytest.mark.parametrize("option", COMMANDS)
def test_what_is_no_address_is_refused_by_name_at_every_command(
    option: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--endpoint" and url == "http://":
        return  # another message: not even the form of one
    for command in COMMANDS[option]:
        assert main([*command, option, url]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"duovolt: {option} ") and NO_ADDRESS[url] in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["http://[::1]:8000", "https://münchen.example/v1", "HTTP://127.0.0.1:8000/", "http://u:p@h:1"]
)
def test_addresses(url: str) -> None:
    assert require_address(url, "--url").hostname


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_to_listen_on_that_is_no_name(host: str) -> None:
    from duovolt.runtime.proxy.server import _listen

    with pytest.raises(InputError, match=r"--host: .* is no name of a host"):
        _listen(host, 0)


@pytest.fixture
def here() -> Iterator[str]:
    """A server on this machine that answers a chat, and knows no proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            chunk = {"choices": [{"delta": {"content": "here"}, "finish_reason": "stop"}]}
            body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"//127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "http://gar:bage"])
def test_no_proxy_is_asked_for_this_machine(
    proxy: str, here: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]"):  # a server says that it is at 0.0.0.0
        assert main(["chat", "--once", "hi", "--url", "http:" + here.replace("127.0.0.1", name)]) == 0
        assert capsys.readouterr().out == "here\n"


@pytest.mark.parametrize("proxy, words", [("socks5://127.0.0.1:9", "SOCKS"), ("http://gar:bage", "Invalid port")])
def test_a_proxy_that_cannot_be_is_told(
    proxy: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    assert main(["chat", "--once", "hi", "--url", "http://server.invalid"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("duovolt: the environment's proxy") and words in error and error.count("\n") == 1


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], str]]:
    """The address of a server that answers anything with these bytes, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(said[0])

    def at(answer: bytes) -> str:
        said.append(answer)
        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield at
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("command", COMMANDS["--url"])
@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x01\x00\x02\x02\x0a"], ids=["silent", "alert"])
def test_a_server_of_tls_that_is_asked_without_is_told(
    command: list[str], answer: bytes, stranger: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--url", stranger(answer)]) == (1 if command[0] == "chat" else 3)
    error = capsys.readouterr().err
    assert "https://" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["eval"], ["bench", "serve"]])
def test_a_key_that_is_missing_is_told_as_one(
    command: list[str], stranger: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    body = b'{"error":{"message":"wrong or missing API key"}}'
    answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    assert main([*command, "--url", stranger(answer)]) == 2
    assert capsys.readouterr().err == "duovolt: the server answered 401: wrong or missing API key\n"


@pytest.mark.parametrize("content", [None, "no certificate"])
@pytest.mark.parametrize(
    "command", [*([*words, "--url", "https://127.0.0.1:9"] for words in COMMANDS["--url"]),
                ["download", "a/b", "nowhere", "--endpoint", "https://127.0.0.1:9"]],
)  # fmt: skip
def test_certificates_that_the_environment_names_in_vain_are_told(
    command: list[str],
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "cert.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"duovolt: SSL_CERT_FILE={file}: ") and error.count("\n") == 1
