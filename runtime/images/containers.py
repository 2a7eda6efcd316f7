"""A video file to the frames that are looked at, in a process of its own: a decoder may crash, hang or ask for too much.

`python -m duovolt.runtime.images.containers` reads a line of JSON (`Order`) and the file's bytes, and writes a line of JSON (the
answer, or `fault`) and the frames, uint8 RGB, resized. Animations are read by Pillow, everything else by PyAV (the extra
`video`), with the demuxer that the file's first bytes name and no other: no playlist, no second file, no network.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from .decoding import ImageFault
from .processor import ImageProcessor
from .video import Room, TooManyTokens, VideoProcessor

SECONDS = 60.0
MAX_FRAME_PIXELS = 4096 * 2304
MAX_DECODED_PIXELS = 8 << 30  # of all frames up to the last one that is looked at: 1080p for a minute and a quarter
MAX_RATE, MIN_RATE = 1000.0, 0.01
_MEMORY = 4 << 30
_INSTALL = (
    'this server lacks the decoder for it (pip install "duovolt[video]"); send frames, or an animated GIF or WebP'
)
_DEMUXERS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda head: head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"), "mov"),
    (lambda head: head.startswith(b"\x1a\x45\xdf\xa3"), "matroska"),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"AVI ", "avi"),
)

_TURNS = {  # degrees against the clock by which frames are shown
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}
_SIDEWAYS = (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270)


@dataclass(frozen=True)
class Order:
    """`fps`: frames a second to look at, None: as the model was trained."""

    video: VideoProcessor
    fps: float | None
    room: Room

    @staticmethod
    def parse(line: bytes) -> Order:
        found = json.loads(line)
        video = found["video"]
        image = ImageProcessor(**video["image"])
        return Order(VideoProcessor(**(video | {"image": image})), found["fps"], Room(**found["room"]))


@dataclass(frozen=True)
class Frames:
    """`data`: frames of height x width, those with these `indices` of a video of `rate` frames a second."""

    height: int
    width: int
    indices: list[int]
    rate: float
    data: bytes


@dataclass(frozen=True)
class _File:
    """A video that was looked into. `frames` gives all of them in order, each once it is asked for."""

    total: int
    rate: float
    height: int
    width: int
    frames: Callable[[], Iterator[Image.Image]]


def decode(data: bytes, order: Order, seconds: float = SECONDS) -> Frames:
    """The frames, decoded in a child process. Raises ImageFault."""
    head = json.dumps(asdict(order)).encode() + b"\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "duovolt.runtime.images.containers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would reserve memory that is counted
    )
    try:
        answer, _ = process.communicate(head + data, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise ImageFault(f"the video was not decoded within {seconds:g} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    line, _, pixels = answer.partition(b"\n")
    try:
        found = json.loads(line)
        if "tokens" in found:
            raise TooManyTokens(int(found["tokens"]))
        if "fault" in found:
            raise ImageFault(str(found["fault"]))
        frames = Frames(found["height"], found["width"], found["indices"], found["rate"], pixels)
        if len(pixels) != 3 * frames.height * frames.width * len(frames.indices):
            raise ValueError("too few bytes")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ImageFault):
            raise
        raise ImageFault(f"the video's decoder broke off (exit code {process.returncode})") from error
    return frames


def read(data: bytes, order: Order) -> Frames:
    """As `decode`, in this process."""
    opened = _animation(data) or _container(data)
    if not MIN_RATE <= opened.rate <= MAX_RATE:
        raise ImageFault(f"{opened.rate:g} frames a second, expected {MIN_RATE:g} to {MAX_RATE:g}")
    if opened.height * opened.width > MAX_FRAME_PIXELS:
        raise ImageFault(f"frames of {opened.width} x {opened.height} pixels, at most {MAX_FRAME_PIXELS} are read")
    indices = order.video.sample(opened.total, opened.rate, order.fps)
    height, width = order.video.fit(len(indices), opened.height, opened.width, order.room)
    if (pixels := (indices[-1] + 1) * opened.height * opened.width) > MAX_DECODED_PIXELS:
        raise ImageFault(f"{pixels} pixels in all frames up to the last, at most {MAX_DECODED_PIXELS} are decoded")
    wanted, parts = set(indices), []
    for number, frame in enumerate(itertools.islice(opened.frames(), indices[-1] + 1)):
        if number in wanted:
            resized = frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
            parts.append(np.asarray(resized).tobytes())
    if len(parts) < max(1, len(wanted) // 2):
        raise ImageFault(f"the video breaks off: {len(parts)} of {len(wanted)} frames could be decoded")
    parts += [parts[-1]] * (len(wanted) - len(parts))  # files may announce frames at their end that nobody is shown
    return Frames(height, width, indices, opened.rate, b"".join(parts))


def _animation(data: bytes) -> _File | None:
    """A GIF or WebP of several frames, at their mean pace; None for other bytes."""
    try:
        image = Image.open(io.BytesIO(data), formats=("GIF", "WEBP"))
    except Exception:  # as for pictures: whatever a broken header makes the parser raise
        return None
    total, shown = getattr(image, "n_frames", 1), 0.0
    if total * image.width * image.height > MAX_DECODED_PIXELS:
        raise ImageFault(
            f"{total} frames of {image.width} x {image.height} pixels, at most {MAX_DECODED_PIXELS} together"
        )
    for number in range(total):
        image.seek(number)
        image.load()  # a WebP's frame tells its duration then
        shown += float(image.info.get("duration") or 100.0)  # of a frame without one, what browsers take

    def frames() -> Iterator[Image.Image]:
        for number in range(total):
            image.seek(number)
            yield image

    return _File(total, 1000.0 * total / shown, image.height, image.width, frames)


def _container(data: bytes) -> _File:
    demuxer = next((name for fits, name in _DEMUXERS if fits(data[:12])), None)
    if demuxer is None:
        raise ImageFault(f"{len(data)} bytes that are no MP4, QuickTime, Matroska, WebM, AVI, GIF or WebP video")
    try:
        import av
    except ImportError as error:
        raise ImageFault(_INSTALL) from error
    container: Any = av.open(io.BytesIO(data), format=demuxer, metadata_errors="replace")
    if not container.streams.video:
        raise ImageFault("the file holds no video")
    stream = container.streams.video[0]
    total = sum(packet.size > 0 for packet in container.demux(stream))
    rate = stream.average_rate or stream.base_rate
    if not total or not rate:
        raise ImageFault("the file holds no frames, or does not say how fast they are shown")

    def decoded() -> Iterator[Any]:
        again: Any = av.open(io.BytesIO(data), format=demuxer, metadata_errors="replace")
        again.streams.video[0].thread_type = "NONE"
        yield from again.decode(video=0)

    if stream.height * stream.width > MAX_FRAME_PIXELS:  # before a frame is decoded
        raise ImageFault(f"frames of {stream.width} x {stream.height} pixels, at most {MAX_FRAME_PIXELS} are read")
    first = next(decoded(), None)
    if first is None:
        raise ImageFault("no frame of the video could be decoded")
    turn = _TURNS.get(first.rotation % 360)
    height, width = (first.width, first.height) if turn in _SIDEWAYS else (first.height, first.width)

    def frames() -> Iterator[Image.Image]:
        for frame in decoded():
            if (frame.height, frame.width) != (first.height, first.width):
                raise ImageFault("the video changes its size")
            yield frame.to_image() if turn is None else frame.to_image().transpose(turn)

    return _File(total, float(rate), height, width, frames)


def main() -> int:
    """The child's side."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS) + 5,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    line, _, data = sys.stdin.buffer.read().partition(b"\n")
    try:
        found = read(data, Order.parse(line))
        head = {"height": found.height, "width": found.width, "indices": found.indices, "rate": found.rate}
    except TooManyTokens as fault:
        head, found = {"tokens": fault.tokens}, None
    except ImageFault as fault:
        head, found = {"fault": str(fault)}, None
    except MemoryError:
        head, found = {"fault": f"decoding asks for more than {_MEMORY >> 30} GiB"}, None
    except Exception as error:  # the libraries' parsers raise whatever broken bytes make them raise
        head, found = {"fault": f"the video is damaged ({type(error).__name__}: {str(error)[:80]})"}, None
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    sys.stdout.buffer.write(b"" if found is None else found.data)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
