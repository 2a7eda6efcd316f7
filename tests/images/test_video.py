"""Videos to groups of frames: transformers' own processor is the reference (stored); hostile files end with one line."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duovolt.checkpoint.errors import InputError
from duovolt.model.config import ModelConfig
from duovolt.runtime.images import containers
from duovolt.runtime.images.containers import Order, decode, read
from duovolt.runtime.images.decoding import ImageFault
from duovolt.runtime.images.processor import ImageProcessor
from duovolt.runtime.images.video import Room, TooManyTokens, VideoProcessor

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "video"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
VISION = ModelConfig.read(TINY).vision
assert VISION is not None
IMAGE = ImageProcessor.read(TINY, VISION)
VIDEO = VideoProcessor.read(TINY, IMAGE)
assert VIDEO is not None
ROOM = Room(1 << 26, 1 << 20)


def film(total: int, height: int, width: int) -> np.ndarray:
    k, y, x, c = np.ogrid[:total, :height, :width, :3]
    return np.round(127.5 + 127.5 * np.sin(0.07 * x + 0.05 * y * (c + 1) + 0.3 * k)).astype(np.uint8)


def animation(frames: np.ndarray, milliseconds: int, kind: str = "WEBP") -> bytes:
    out = io.BytesIO()
    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(out, kind, save_all=True, append_images=rest, duration=milliseconds, loop=0, lossless=True)
    return out.getvalue()


def container(frames: np.ndarray, rate: int, form: str = "mp4", codec: str = "libx264") -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p" if codec == "libx264" else "yuv420p"
        if codec == "libx264":
            stream.options = {"qp": "0"}
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def test_sizes_are_those_of_transformers() -> None:
    capped = replace(VIDEO, capped=True)
    assert len(EXPECTED["sizes"]) == 120 and sum(wanted is not None for *_, wanted, _ in EXPECTED["sizes"]) > 100
    for frames, height, width, wanted, with_cap in EXPECTED["sizes"]:
        if wanted is None:
            with pytest.raises(ValueError, match="strips"):
                VIDEO.size_for(frames, height, width)
            continue
        assert list(VIDEO.size_for(frames, height, width)) == wanted, (frames, height, width)
        assert list(capped.size_for(frames, height, width)) == with_cap, (frames, height, width)


@pytest.mark.parametrize(("total", "rate", "fps", "indices", "times"), EXPECTED["samples"])
def test_frames_and_times_are_those_of_transformers(
    total: int, rate: float, fps: float | None, indices: list[int], times: list[str]
) -> None:
    assert VIDEO.sample(total, rate, fps) == indices
    assert [f"{time:.1f}" for time in VIDEO.times(indices, rate)] == times


def test_patches_are_those_of_transformers() -> None:
    """Pillow's resizing against torchvision's: at most two of 255 levels, in one value of a hundred."""
    total, height, width, rate = EXPECTED["film"]
    found = read(animation(film(total, height, width), round(1000 / rate)), Order(VIDEO, None, ROOM))
    groups, rows, columns = EXPECTED["grid"]
    assert (found.height, found.width, len(found.indices)) == (16 * rows, 16 * columns, 2 * groups)
    frames = np.frombuffer(found.data, np.uint8).reshape(groups, 2, found.height, found.width, 3)
    patches = np.concatenate([IMAGE.patches(group) for group in frames])
    wanted = np.load(FIXTURE / "patches.npz")["patches"]
    levels = np.abs((patches * 0.5 + 0.5) * 255 - wanted)
    assert patches.shape == wanted.shape and levels.max() < 2.01 and (levels > 0.5).mean() < 0.01


@pytest.mark.parametrize("kind", ["WEBP", "GIF"])
def test_animations_are_videos(kind: str) -> None:
    frames = np.stack([np.full((64, 64, 3), 20 * k, np.uint8) for k in range(12)])
    found = read(animation(frames, 250, kind), Order(VIDEO, 2.0, ROOM))
    assert found.rate == pytest.approx(4.0) and found.indices == [0, 2, 4, 7, 9, 11]
    shown = np.frombuffer(found.data, np.uint8).reshape(6, 64, 64, 3)
    assert shown[:, 5, 5, 0].tolist() == [20 * k for k in found.indices]


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
def test_containers(form: str, codec: str) -> None:
    """In the child process, from the first bytes alone; frames are where the greys say."""
    frames = np.stack([np.full((64, 96, 3), 20 + 8 * k, np.uint8) for k in range(24)])
    found = decode(container(frames, 8, form, codec), Order(VIDEO, None, ROOM))
    assert (found.height, found.width, found.rate) == (64, 96, 8.0) and found.indices == [0, 5, 9, 14, 18, 23]
    shown = np.frombuffer(found.data, np.uint8).reshape(-1, 64, 96, 3)[:, 30, 40].mean(axis=-1)
    assert np.abs(shown - [20 + 8 * k for k in found.indices]).max() < 5


def test_a_lossless_file_gives_the_frames() -> None:
    frames = film(8, 64, 64)
    found = read(container(frames, 2), Order(VIDEO, None, ROOM))
    shown = np.frombuffer(found.data, np.uint8).reshape(-1, 64, 64, 3)
    assert found.indices == list(range(8)) and np.abs(shown.astype(int) - frames).max() <= 4  # of the colour space


def test_too_much_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = container(film(24, 64, 96), 8)
    with pytest.raises(TooManyTokens) as fault:
        decode(data, Order(VIDEO, None, Room(1 << 26, 17)))
    assert fault.value.tokens == 18  # three groups of 2 x 3
    with pytest.raises(ImageFault, match="6 frames have 110592 bytes after resizing, at most 100000"):
        decode(data, Order(VIDEO, None, Room(100_000, 99)))
    monkeypatch.setattr(containers, "MAX_DECODED_PIXELS", 24 * 64 * 96 - 1)
    with pytest.raises(ImageFault, match="147456 pixels in all frames"):
        read(data, Order(VIDEO, None, ROOM))
    monkeypatch.setattr(containers, "MAX_FRAME_PIXELS", 6143)
    with pytest.raises(ImageFault, match="frames of 96 x 64 pixels"):
        read(data, Order(VIDEO, None, ROOM))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that are no MP4"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "that are no MP4"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "that are no MP4"),
        (b"\0\0\0\x18ftypmp42" + bytes(5000), "the video is damaged"),
        (b"\x1a\x45\xdf\xa3" + b"\xff" * 5000, "the video is damaged"),
        (b"RIFF\xff\xff\xff\xffAVI " + b"LIST" * 2000, "the video is damaged"),
        (b"GIF89a" + b"\xff" * 300, "."),
    ],
)
def test_hostile_bytes_end_with_one_line(data: bytes, words: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(ImageFault, match=words):
        decode(data, Order(VIDEO, None, ROOM))


def test_damage_anywhere_is_a_line_or_a_video() -> None:
    """Bytes turned at random places: no answer but frames or a fault."""
    good = container(film(6, 64, 64), 2, "matroska", "mpeg4")
    generator = np.random.default_rng(4)
    ended: dict[str, int] = {"frames": 0, "fault": 0}
    for _ in range(60):
        bad = bytearray(good)
        for place in generator.integers(0, len(bad), 8):
            bad[place] = int(generator.integers(0, 256))
        try:
            found = read(bytes(bad[: int(generator.integers(len(bad) // 2, len(bad)))]), Order(VIDEO, None, ROOM))
            assert len(found.data) == 3 * found.height * found.width * len(found.indices)
            ended["frames"] += 1
        except ImageFault:
            ended["fault"] += 1
        except Exception as error:  # what `main` tells as damage
            assert type(error).__module__.startswith(("av", "builtins")), error
            ended["fault"] += 1
    assert ended["frames"] and ended["fault"]


def test_a_decoder_that_hangs_or_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    data = animation(film(4, 64, 64), 500)
    with pytest.raises(ImageFault, match=r"not decoded within 0\.001 s"):
        decode(data, Order(VIDEO, None, ROOM), seconds=0.001)
    monkeypatch.setattr(containers.sys, "executable", "/bin/false")
    with pytest.raises(ImageFault, match=r"broke off \(exit code 1\)"):
        decode(data, Order(VIDEO, None, ROOM))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14, expected 16"),
        ({"image_mean": [0.1, 0.1, 0.1]}, "image_mean"),
        ({"size": {"shortest_edge": 10, "longest_edge": 20}}, "a token stands for 2048"),
        ({"size": {"shortest_edge": -1}}, "shortest_edge is -1"),
        ({"max_frames": 3}, "4 to 3 frames"),
        ({"fps": "2"}, "fps is '2'"),
        ({"max_frames": 1e9}, "max_frames is"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    found = json.loads((TINY / "video_preprocessor_config.json").read_text()) | changes
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=words):
        VideoProcessor.read(tmp_path, IMAGE)
    assert VideoProcessor.read(tmp_path / "none", IMAGE) is None
