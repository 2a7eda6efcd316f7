"""Bodies that no decoder can read whole: any bytes get 400 or an answer, and never the server's own fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.proxy.foreign_fields import REFUSED

from .local_api import LocalApi
from .stub_model import blocks, make_ranks, write_script

USER = b'"messages":[{"role":"user","content":"hi"}]'
LEAST = {
    "/v1/chat/completions": USER + b',"max_tokens":2',
    "/v1/completions": b'"prompt":"hi","max_tokens":2',
    "/v1/responses": b'"input":"hi","max_output_tokens":2',
    "/v1/messages": USER + b',"max_tokens":2',
    "/v1/messages/count_tokens": USER,
}
ANSWERING = sorted(LEAST.keys() - {"/v1/messages/count_tokens"})
# Values that a decoder skips, for the field is not of the body's type, and cannot read.
UNREADABLE = [b"1e999", b"-1e400", b"9" * 5000, b'"\xff\xfe"', b'["\xc3("]', b'{"\x80":1}']
NESTED = b"[" * 900 + b"]" * 900
OWN = ["messages", "prompt", "input", "tools", "stop", "text", "reasoning", "thinking", "system", "chat_template_kwargs",
       "response_format", "output_config", "logit_bias", "seed", "top_p", "metadata", "tool_choice", "n"]  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    folder = tmp_path_factory.mktemp("unreadable")
    script = write_script(folder / "script.jsonl", {"blocks": blocks("Hello")})
    return LocalApi(make_ranks(folder / "ranks", 1), script, max_context=1000)


def with_field(path: str, key: bytes, value: bytes) -> bytes:
    return b"{" + LEAST[path] + b',"' + key + b'":' + value + b"}"


def refused(api: LocalApi, path: str, body: bytes) -> str:
    status, answer = api.post(path, body)
    assert status == 400, (status, answer)
    return str(answer["error"]["message"])


@pytest.mark.parametrize("value", UNREADABLE)
def test_a_refused_field_that_cannot_be_read_is_refused_by_name(api: LocalApi, value: bytes) -> None:
    for path in ANSWERING:
        assert refused(api, path, with_field(path, b"dry_multiplier", value)).startswith("dry_multiplier")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for name in ("container", "mcp_servers"):
            assert refused(api, path, with_field(path, name.encode(), value)).startswith(name)


@pytest.mark.parametrize("path", LEAST)
def test_a_key_that_is_not_utf8_is_refused(api: LocalApi, path: str) -> None:
    assert "the body is not valid JSON" in refused(api, path, with_field(path, b"\xff\xfe", b"1"))


_readable = [
    b"null",
    b"0",
    b"-1",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"[{}]",
    b'["x"]',
    b'"none"',
    b'{"type":"x"}',
    b'"\\ud800"',
]
_values = st.one_of(st.sampled_from([*UNREADABLE, *_readable, NESTED]), st.binary(max_size=8))
_keys = st.one_of(st.sampled_from(sorted(name.encode() for name in [*REFUSED, *OWN])), st.binary(max_size=6))


@settings(max_examples=250, deadline=None)
@given(
    path=st.sampled_from(sorted(LEAST)),
    more=st.lists(st.tuples(_keys, _values), max_size=2),
    cut=st.one_of(st.none(), st.integers(0, 60)),
    noise=st.binary(max_size=3),
)
def test_any_bytes_get_400_or_an_answer(
    api: LocalApi, path: str, more: list[tuple[bytes, bytes]], cut: int | None, noise: bytes
) -> None:
    """Whole bodies with fields of any bytes, and bodies with bytes put in, or cut off, somewhere."""
    fields = b"".join(b',"' + key + b'":' + value for key, value in more)
    body = b"{" + LEAST[path] + fields + b"}"
    body = body if cut is None else body[:cut] + noise + (body[cut:] if noise else b"")
    status, answer = api.say(blocks("Hello"), path, body)
    assert status in (200, 400), (body, answer)
    assert status == 200 or answer["error"]["message"]
