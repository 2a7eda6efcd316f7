"""A picture from an HTTP body through two reference ranks of the bundled model: widths, drafts and streams agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, running
from .local_api import TINY
from .real_model import duovolt
from .test_images import FIRST, SECOND, chat, data_url, png

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    duovolt("convert", TINY, folder / "converted", "--recipe", "bf16", "--quiet")
    for size in (1, 2):
        duovolt("shard", folder / "converted", folder / f"ranks-{size}", "--tp", str(size), "--quiet")
    return folder


def answer(server: Server, *urls: str, video: list[str] | None = None) -> tuple[list[Any], int]:
    """The tokens of a greedy answer as bytes, and the length of its prompt."""
    body = chat(*urls)
    if video is not None:
        body["messages"][0]["content"].insert(0, {"type": "video", "video": video})
    body |= {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "logprobs": True}
    with server.client(60) as client:
        found = client.post(CHAT, json=body).json()
    entries = found["choices"][0]["logprobs"]["content"]
    return [(entry["bytes"], round(entry["logprob"], 3)) for entry in entries], found["usage"]["prompt_tokens"]


def test_two_ranks_answer_about_pictures_as_one_does(folder: Path) -> None:
    urls = data_url(FIRST), data_url(SECOND)
    frames = [data_url(png(64, 64, seed)) for seed in range(4)]
    found, films = {}, {}
    for size, drafts in ((1, "0"), (2, "3")):
        options = ("--max-context", "512", "--drafts", drafts, "--prefill-chunk", "11")
        for server in running(folder / f"ranks-{size}", *options):
            found[size] = [answer(server, *given) for given in (urls, urls, urls[::-1], ())]
            films[size] = [answer(server, video=order) for order in (frames, frames[::-1])]
            assert server.metric("restarts_total") == 0
    assert [[token for token, _ in tokens] for tokens, _ in found[1]] == [
        [t for t, _ in tokens] for tokens, _ in found[2]
    ]
    for both, again, turned, without in found.values():
        assert both == again
        assert both[1] == turned[1] == without[1] + 9 + 4, "9 tokens of pictures, 4 marks around them"
        assert both[0] != turned[0], "the order of the pictures shows in the model's own probabilities"
    assert [[token for token, _ in tokens] for tokens, _ in films[1]] == [
        [t for t, _ in tokens] for tokens, _ in films[2]
    ]
    for forth, back in films.values():
        assert forth[1] == back[1] > found[1][3][1] + 8 + 4 and forth[0] != back[0], "the order of the frames shows"


@pytest.mark.parametrize(
    "devices", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("0", marks=pytest.mark.gpu)]
)
@pytest.mark.timeout(300)
def test_a_card_answers_about_pictures_and_videos_as_the_reference_does(folder: Path, devices: str) -> None:
    """`cpu`: the same engine on the kernels' references."""
    frames = [data_url(png(64, 64, seed)) for seed in range(4)]
    asked: list[dict[str, Any]] = [{"urls": [data_url(FIRST), data_url(SECOND)]}, {"urls": [], "video": frames}]
    found = []
    for options in (("reference", "--drafts", "0"), ("cuda", "--devices", devices, "--kv", "fp16")):
        more = ("--max-context", "512", "--prefill-chunk", "11", "--backend", *options)
        for server in running(folder / "ranks-1", *more, seconds=100):
            found.append([answer(server, *one["urls"], video=one.get("video")) for one in asked])
    for (wanted, count), (ours, length) in zip(*found, strict=True):
        assert length == count and [token for token, _ in ours] == [token for token, _ in wanted]
        apart = max(abs(a - b) for (_, a), (_, b) in zip(ours, wanted, strict=True))
        print(f"log probabilities apart by {apart:.3f} at most")
        assert apart < 0.05
