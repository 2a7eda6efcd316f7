"""Videos through the chat API: the prompt that transformers would make, every form of the same frames, and refusals."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duovolt.model.config import ModelConfig
from duovolt.runtime.messages import GenerateRequest
from duovolt.runtime.proxy import videos
from duovolt.runtime.proxy.media import Media, VideoSource
from duovolt.runtime.proxy.pictures import PictureReader, encode_with_pictures
from duovolt.runtime.proxy.tokenizer import TextTokenizer
from duovolt.runtime.proxy.videos import Video, spell_videos

from .local_api import TINY, LocalApi, bundled_api
from .stub_model import make_ranks, write_script

EXPECTED = json.loads((Path(__file__).parents[1] / "fixtures" / "video" / "expected.json").read_text())
IMAGE, VIDEO, START, END = 3029, 3030, 3027, 3028
CHAT = "/v1/chat/completions"


def film(total: int, height: int, width: int) -> np.ndarray:
    """The fixture's."""
    k, y, x, c = np.ogrid[:total, :height, :width, :3]
    return np.round(127.5 + 127.5 * np.sin(0.07 * x + 0.05 * y * (c + 1) + 0.3 * k)).astype(np.uint8)


def picture(frame: np.ndarray, kind: str = "PNG") -> str:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, kind)
    return base64.b64encode(out.getvalue()).decode()


def animation(frames: np.ndarray, milliseconds: int) -> str:
    out = io.BytesIO()
    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(out, "WEBP", save_all=True, append_images=rest, duration=milliseconds, lossless=True)
    return "data:video/webp;base64," + base64.b64encode(out.getvalue()).decode()


FRAMES = film(4, 64, 64)  # two groups of 2 x 2 tokens
LIST = [f"data:image/png;base64,{picture(frame)}" for frame in FRAMES]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> LocalApi:
    return bundled_api(tmp_path_factory.mktemp("videos"))


def chat(*parts: dict[str, Any], text: str = "what?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def sent(api: LocalApi, body: Any) -> GenerateRequest:
    status, answer = api.say([[100, 3026]], CHAT, body)
    assert status == 200, answer
    (request,) = (one for one in api.sent if isinstance(one, GenerateRequest))
    return request


def test_the_prompt_is_that_of_transformers() -> None:
    """Ids with times in the text, and rotary positions."""
    tokenizer = TextTokenizer(TINY)
    reader = PictureReader.of(TINY, ModelConfig.read(TINY), tokenizer, False)
    total, height, width, rate = EXPECTED["film"]
    media = Media(videos=[VideoSource([animation(film(total, height, width), round(1000 / rate))])])
    placed = encode_with_pictures(EXPECTED["text"], media, reader, tokenizer, 600)
    assert placed.ids == EXPECTED["ids"] and placed.rope_positions == EXPECTED["positions"]
    assert [image.frames for image in placed.images] == [2, 2, 2]
    for image in placed.images:
        assert placed.ids[image.start - 1 : image.start + 7] == [START, *[VIDEO] * 6, END]


def test_every_form_of_the_same_frames_is_the_same_request(api: LocalApi) -> None:
    joined = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in LIST)
    forms = [
        {"type": "video_url", "video_url": {"url": joined, "fps": 2}},
        {"type": "video_url", "video_url": joined},
        {"type": "video", "video": LIST},
        {"type": "video", "video": LIST, "fps": 2.0},
        {"type": "video_url", "video_url": {"url": animation(FRAMES, 500)}},
    ]
    requests = [sent(api, chat(form)) for form in forms]
    first = requests[0]
    assert [image.pixels for image in first.images] == [FRAMES[:2].tobytes(), FRAMES[2:].tobytes()]
    for other in requests[1:]:
        assert (other.prompt, other.images, other.rope_positions) == (first.prompt, first.images, first.rope_positions)
    slower = sent(api, chat({"type": "video", "video": LIST, "fps": 0.5}))
    assert slower.images[0].pixels == first.images[0].pixels and slower.prompt != first.prompt
    text = api.post("/detokenize", {"tokens": slower.prompt})[1]["prompt"]
    assert "<1.0 seconds><|vision_start|>" in text and "<5.0 seconds><|vision_start|>" in text


def test_an_odd_frame_is_shown_twice(api: LocalApi) -> None:
    images = sent(api, chat({"type": "video", "video": LIST[:3]})).images
    assert images[1].pixels == FRAMES[2].tobytes() * 2


def test_counts_are_exact_beside_pictures(api: LocalApi) -> None:
    body = chat({"type": "image_url", "image_url": {"url": LIST[0]}}, {"type": "video", "video": LIST})
    request = sent(api, body)
    assert [image.frames for image in request.images] == [1, 2, 2]
    assert (request.prompt.count(IMAGE), request.prompt.count(VIDEO)) == (4, 8)
    status, tokens = api.post("/tokenize", body)
    assert status == 200 and tokens["tokens"] == request.prompt
    assert all(0 < at <= len(request.prompt) for at in request.checkpoints) and request.checkpoints
    assert api.request("GET", "/status").json()["videos"] is True


def test_places_in_the_text_move_with_the_times() -> None:
    text, video = "ab<|video_pad|>cd<|video_pad|>ef", Video([], [0.25, 1.0])
    spelled, ends = spell_videos(text, [video, video], [1, 2, 15, 17, 30, 32])
    assert spelled.count("<|video_pad|>") == 4 and spelled.startswith("ab<0.2 seconds><|vision_start|>")
    assert [spelled[end:] for end in ends[2:]] == [
        f"cd{video.spelled}ef",
        f"{video.spelled}ef",
        "ef",
        "",
    ] and ends[:2] == [1, 2]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video_url"}, "messages[0].content[0].video_url: expected an object with a url"),
        ({"type": "video", "video": []}, "messages[0].content[0].video: expected"),
        ({"type": "video", "video": [5]}, "messages[0].content[0].video: expected"),
        ({"type": "video", "video": LIST, "fps": 0}, "fps is 0, expected"),
        ({"type": "video", "video": LIST, "fps": True}, "fps is True"),
        ({"type": "video", "video": [*LIST, LIST[0][:-900]]}, "video 1: the picture breaks off"),
        ({"type": "video", "video": [LIST[0], "data:image/png;base64,@@"]}, "video 1: frame 2: the data is not base64"),
        ({"type": "video", "video": [LIST[0], f"data:image/png;base64,{picture(FRAMES[0][:32])}"]}, "another size"),
        (
            {"type": "video", "video": [LIST[0]]},
            "video 1: frame 1: a video of 1 frame; from 2 on it is one, send an image",
        ),
        ({"type": "video_url", "video_url": LIST[0]}, "no MP4"),
        ({"type": "video_url", "video_url": "http://example.org/a.mp4"}, "video 1: this server fetches no URLs"),
        ({"type": "video_url", "video_url": "file:///etc/passwd"}, "is not a URL of the form data:"),
        ({"type": "video", "video": [LIST[0]] * 769}, "769 frames, at most 768"),
    ],
)
def test_bad_videos(api: LocalApi, part: dict[str, Any], words: str) -> None:
    status, answer = api.post(CHAT, chat(part))
    assert status == 400 and words in answer["error"]["message"], answer
    assert not api.sent


def test_pads_are_those_of_the_videos(api: LocalApi) -> None:
    status, answer = api.post(CHAT, chat({"type": "video", "video": LIST}, text="<|video_pad|>"))
    assert status == 400 and "2 times <|video_pad|>, the request 1 videos" in answer["error"]["message"]
    status, answer = api.post(CHAT, chat(*[{"type": "video", "video": LIST}] * 9))
    assert status == 400 and "9 videos in one request, this server reads 8" in answer["error"]["message"]
    status, answer = api.post(CHAT, chat(*[{"type": "video", "video": LIST * 16}] * 5))
    assert status == 400 and "context is 600 tokens; videos 1 to 5 take 640" in answer["error"]["message"]
    status, answer = api.post("/v1/completions", {"prompt": [5, VIDEO]})
    assert status == 400 and "<|video_pad|> stands for a picture" in answer["error"]["message"]


def test_all_frames_together_have_a_bound(api: LocalApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MAX_SOURCE_PIXELS", 7 * 64 * 64)
    part = {"type": "video", "video": LIST}
    status, answer = api.post(CHAT, chat(part, part))
    assert status == 400 and "video 2: the frames have more than 28672 pixels" in answer["error"]["message"]
    sent(api, chat(part))


def test_models_that_read_no_video(tmp_path: Path) -> None:
    part = {"type": "video", "video": LIST}
    (tmp_path / "blind").mkdir()
    blind = LocalApi(make_ranks(tmp_path / "blind" / "ranks", 1), write_script(tmp_path / "s", {"blocks": [[1]]}))
    status, answer = blind.post(CHAT, chat(part))
    assert status == 400 and "this server reads no video: the model has no vision tower" in answer["error"]["message"]
    api = bundled_api(tmp_path / "still")
    (tmp_path / "still" / "ranks" / "rank-0-of-1" / "video_preprocessor_config.json").unlink()
    again = LocalApi(tmp_path / "still" / "ranks", tmp_path / "still" / "script.jsonl", max_context=600)
    assert api.request("GET", "/status").json()["videos"] and not again.request("GET", "/status").json()["videos"]
    status, answer = again.post(CHAT, chat(part))
    assert status == 400 and "no video_preprocessor_config.json" in answer["error"]["message"]
