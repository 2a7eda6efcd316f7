"""Pictures through every API: one meaning, exact counts, refusals in each API's own shape, and no way into the network."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duovolt.runtime.images.decoding import ImageFault
from duovolt.runtime.messages import GenerateRequest
from duovolt.runtime.proxy import image_urls
from duovolt.runtime.proxy.image_urls import Fetches, is_public

from .local_api import LocalApi, bundled_api
from .stub_model import make_ranks, write_script

PAD = 3029
CHAT, RESPONSES, MESSAGES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


def png(width: int, height: int, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


FIRST, SECOND = png(64, 96), png(100, 40, 1)  # 6 tokens; 96 x 32 pixels after resizing: 3 tokens


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    return bundled_api(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("blind")
    return LocalApi(make_ranks(folder / "ranks", 1), write_script(folder / "s", {"blocks": [[1]]}), max_context=600)


def chat(*urls: str, text: str = "what?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def responses(*urls: str, text: str = "what?") -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return {"input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]}


def messages(*urls: str, text: str = "what?") -> dict[str, Any]:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        if url.startswith("data:image/png;base64,")
        else {"type": "url", "url": url}
        for url in urls
    ]
    parts = [{"type": "image", "source": source} for source in sources]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


BODIES = [(CHAT, chat, {}), (RESPONSES, responses, {}), (MESSAGES, messages, {"max_tokens": 9})]


def sent(api: LocalApi, path: str, body: Any) -> GenerateRequest:
    status, answer = api.say([[100, 3026]], path, body)
    assert status == 200, answer
    (request,) = (one for one in api.sent if isinstance(one, GenerateRequest))
    return request


def test_every_api_makes_the_same_request(api: LocalApi) -> None:
    """Two pictures of 6 and 3 tokens, in their order, before the text."""
    urls = data_url(FIRST), data_url(SECOND)
    requests = [sent(api, path, build(*urls) | more) for path, build, more in BODIES]
    first = requests[0]
    assert [(image.height, image.width) for image in first.images] == [(96, 64), (32, 96)]
    assert first.images[0].pixels == np.asarray(Image.open(io.BytesIO(FIRST))).tobytes()
    for image, tokens in zip(first.images, (6, 3), strict=True):
        assert first.prompt[image.start - 1 : image.start + tokens + 1] == [3027, *[PAD] * tokens, 3028]
    assert first.prompt.count(PAD) == 9
    assert first.rope_positions is not None and max(map(max, first.rope_positions)) == len(first.prompt) - 1 - 9 + 3 + 3
    for other in requests[1:]:
        assert (other.prompt, other.images, other.rope_positions) == (first.prompt, first.images, first.rope_positions)


def test_counts_are_exact(api: LocalApi) -> None:
    urls = data_url(FIRST), data_url(SECOND)
    wanted = len(sent(api, CHAT, chat(*urls)).prompt)
    assert api.post(COUNT, messages(*urls)) == (200, {"input_tokens": wanted})
    status, tokens = api.post("/tokenize", chat(*urls))
    assert status == 200 and tokens["count"] == wanted
    assert api.say([[100, 3026]], CHAT, chat(*urls))[1]["usage"]["prompt_tokens"] == wanted
    assert api.say([[100, 3026]], RESPONSES, responses(*urls))[1]["usage"]["input_tokens"] == wanted
    assert api.say([[100, 3026]], MESSAGES, messages(*urls) | {"max_tokens": 9})[1]["usage"]["input_tokens"] == wanted


def test_results_of_tools_may_be_pictures(api: LocalApi) -> None:
    block = messages(data_url(FIRST))["messages"][0]["content"][0]
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    talk = [("user", "look"), ("assistant", [use]), ("user", [result])]
    body = {"max_tokens": 9, "messages": [{"role": role, "content": content} for role, content in talk]}
    through_messages = sent(api, MESSAGES, body)
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_image", "image_url": data_url(FIRST)}],
    }
    through_responses = sent(api, RESPONSES, {"input": [{"role": "user", "content": "look"}, call, output]})
    assert len(through_messages.images) == 1
    assert through_messages.prompt == through_responses.prompt


@pytest.mark.parametrize(("path", "build", "more"), BODIES)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,@@@", "image 2: the data is not base64"),
        ("data:image/png;base64,", "image 2: 0 bytes that are no PNG"),
        (data_url(FIRST[:3000]), "image 2: the picture breaks off"),
        (data_url(png(201, 1)), "image 2: 201 x 1 pixels are a strip"),
        ("http://example.org/x.png", "image 2: this server fetches no URLs (--allow-image-urls)"),
        ("file:///etc/passwd", "image 2: 'file:///etc/passwd' is not a URL of the form data:"),
        ("ftp://example.org/x.png", "is not a URL of the form data:"),
        ("data:image/png,abc", "is not a URL of the form data:"),
    ],
)
def test_bad_pictures(api: LocalApi, path: str, build: Callable[..., Any], more: Any, url: str, words: str) -> None:
    status, answer = api.post(path, build(data_url(SECOND), url) | more)
    assert status == 400
    assert (answer["type"] == "error") if path == MESSAGES else (answer["error"]["code"] == "invalid_image")
    assert words in answer["error"]["message"]
    assert not api.sent


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, chat(*[data_url(SECOND)] * 65), "65 images in one request, this server reads 64"),
        (CHAT, chat(*[data_url(png(512, 512))] * 3), "context is 600 tokens; the images take 768"),
        (CHAT, chat(text="<|image_pad|>"), "1 times <|image_pad|>, the request 0 images"),
        (CHAT, chat(data_url(FIRST), text="<|image_pad|>"), "2 times <|image_pad|>, the request 1 images"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "video_url: expected an object with a url"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "no files are kept"),
        (RESPONSES, {"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]},
         "text is read here, not input_image"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}]},
         "messages[0].content[0].source"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "assistant", "content": [{"type": "image"}]},
                                                  {"role": "user", "content": "x"}]}, "text is read here, not image"),
        ("/v1/completions", {"prompt": [{"type": "image_url"}]}, "images go with messages"),
        ("/v1/completions", {"prompt": "a <|image_pad|>"}, "stands for a picture"),
        ("/v1/completions", {"prompt": [5, PAD]}, "stands for a picture"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(api: LocalApi, path: str, body: Any, words: str) -> None:
    status, answer = api.post(path, body)
    assert status == 400 and words in answer["error"]["message"], answer
    assert not api.sent


@pytest.mark.parametrize(("path", "build", "more"), BODIES)
def test_a_model_without_a_tower(blind: LocalApi, path: str, build: Callable[..., Any], more: Any) -> None:
    status, answer = blind.post(path, build(data_url(FIRST)) | more)
    assert (
        status == 400 and "reads text only, not image_url: the model has no vision tower" in answer["error"]["message"]
    )


def test_the_page_learns_what_the_model_reads(api: LocalApi, blind: LocalApi) -> None:
    assert api.request("GET", "/status").json()["images"] is True
    assert blind.request("GET", "/status").json()["images"] is False


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False),
        ("fe80::1", False), ("fc00::1", False), ("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False), ("ff02::1", False), ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{port}/x", "127.0.0.1 is at 127.0.0.1, which is not a public address"),
        ("http://localhost:{port}/x", "which is not a public address"),
        ("http://[::1]:{port}/x", "which is not a public address"),
        ("http://2130706433:{port}/x", "which is not a public address"),
        ("http://user@example.org/x", "without a user name"),
        ("http:///x", "without a user name"),
        ("http://h:99999999/", "not a URL"),
        ("http://h/\r\nX: y", "not a URL"),
        ("http://" + "a" * 3000, "3007 characters"),
    ],
)
def test_urls_that_are_refused_before_a_connection(url: str, words: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        api = bundled_api(tmp_path, allow_image_urls=True)
        status, answer = api.post(CHAT, chat(url.format(port=listener.getsockname()[1])))
        assert status == 400 and words in answer["error"]["message"], answer
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture
def web() -> Iterator[Callable[[list[bytes]], str]]:
    """serve(pieces) -> URL whose answer is these bytes, 0.2 s apart."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(pieces: list[bytes]) -> str:
            def answer() -> None:
                link = listener.accept()[0]
                with link:
                    link.recv(4096)
                    try:
                        for piece in pieces:
                            link.sendall(piece)
                            time.sleep(0.2 if len(pieces) > 1 else 0)
                    except OSError:
                        return

            threading.Thread(target=answer, daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}/a.png?b=c"

        yield serve


def anywhere(address: object) -> bool:
    return True


def ok(data: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(data) if length is None else length) + data


def test_a_fetched_picture(web: Callable[[list[bytes]], str]) -> None:
    assert Fetches(anywhere).fetch(web([ok(FIRST)])) == FIRST


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"], "redirects are not followed"),
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"], "answers 404"),
        ([b"no http\r\n\r\n"], "did not give it"),
        ([ok(FIRST[:50], 5000)], "broke off"),
        ([ok(bytes(3000))], "more than 2000 bytes"),
        ([b"HTTP/1.1 200 OK\r\n", *[b"X"] * 100], "did not give it within 1 s"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", *[b"X"] * 100], "broke off|within 1 s"),
    ],
)  # fmt: skip
def test_servers_that_misbehave(
    web: Callable[[list[bytes]], str], monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], words: str
) -> None:
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", 2000)
    monkeypatch.setattr(image_urls, "FETCH_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(ImageFault, match=words):
        Fetches(anywhere).fetch(web(pieces))
    assert time.monotonic() - began < 5


def test_the_urls_of_a_request_have_one_time_together(
    web: Callable[[list[bytes]], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """64 servers that drip would hold a request for 64 times the time of one."""
    monkeypatch.setattr(image_urls, "FETCH_SECONDS", 5.0)
    monkeypatch.setattr(image_urls, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(image_urls.Fetches.__init__, "__defaults__", (anywhere,))
    api = bundled_api(tmp_path, allow_image_urls=True)
    began = time.monotonic()
    status, answer = api.post(CHAT, chat(*[web([b"HTTP/1.1 200 OK\r\n", *[b"X"] * 100])] * 64))
    assert time.monotonic() - began < 5
    message = answer["error"]["message"]
    assert status == 400 and "image 1: 127.0.0.1 did not give it within 1 s" in message, message
    assert message.endswith("the URLs of a request have 1 s together"), message


def test_time_that_earlier_urls_took_is_gone(
    web: Callable[[list[bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_urls, "REQUEST_SECONDS", 1.0)
    fetches = Fetches(anywhere)
    slowly = ok(FIRST)
    assert fetches.fetch(web([slowly[:9], slowly[9:20], slowly[20:]])) == FIRST
    left = fetches._left
    assert 0 < left < 0.7
    time.sleep(0.1)  # decoding and the like: not the web's time
    assert fetches._left == left
    with pytest.raises(ImageFault, match=r"did not give it within 0\.\d+ s .*1 s together"):
        fetches.fetch(web([b"HTTP/1.1 200 OK\r\n", *[b"X"] * 100]))
    with pytest.raises(ImageFault, match="not fetched: the URLs of a request have 1 s together"):
        fetches.fetch("http://127.0.0.1:9/never-asked")


def test_the_lookup_of_a_name_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*arguments: Any, **more: Any) -> Any:
        released.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(image_urls, "FETCH_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(ImageFault, match=r"slow\.example was not found within 0\.3 s"):
        Fetches(anywhere).fetch("http://slow.example/a.png")
    assert time.monotonic() - began < 5
    released.set()


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ImageFault, match=r"^nowhere\.example has no address$"):
        Fetches(anywhere).fetch("http://nowhere.example/a.png")
