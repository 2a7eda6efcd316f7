"""The videos of a request: to groups of frames and their times, and these into the text of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...model.config import ModelConfig
from ..images.containers import Frames, Order, decode
from ..images.decoding import ImageFault, Picture
from ..images.placing import Pixels
from ..images.processor import ImageProcessor
from ..images.video import Room, TooManyTokens, VideoProcessor
from .errors import bad_request
from .media import VideoSource
from .tokenizer import TextTokenizer

VIDEO_PAD, VISION_START, VISION_END = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
MAX_VIDEOS = 8
MAX_SOURCE_PIXELS = 1 << 30  # of all frames of a request that come as pictures, before resizing
NO_VIDEO = f"the model has no {VIDEO_PAD} or no video_preprocessor_config.json"


@dataclass(frozen=True)
class Video:
    """Groups of frames, and the seconds at which each is shown."""

    groups: list[Pixels]
    times: list[float]

    @property
    def spelled(self) -> str:
        """What stands in the prompt for the video's pad: a pad of its own for every group."""
        return "".join(f"<{time:.1f} seconds>{VISION_START}{VIDEO_PAD}{VISION_END}" for time in self.times)


@dataclass(frozen=True)
class VideoReader:
    """How this server reads videos. `pad`: the id of `<|video_pad|>`."""

    processor: VideoProcessor
    pad: int

    @staticmethod
    def of(directory: Path, config: ModelConfig, image: ImageProcessor, tokenizer: TextTokenizer) -> VideoReader | None:
        """None for a model that reads pictures only. Raises InputError for settings that make no sense."""
        if config.video_token is None or tokenizer.marker(VIDEO_PAD) != config.video_token:
            return None
        if tokenizer.marker(VISION_START) is None or tokenizer.marker(VISION_END) is None:
            return None
        processor = VideoProcessor.read(directory, image)
        return None if processor is None else VideoReader(processor, config.video_token)

    def read(
        self, sources: list[VideoSource], load: Callable[[str], bytes], max_context: int, max_bytes: int
    ) -> list[Video]:
        """The videos; `load` fetches a URL, `max_bytes` of all frames after resizing. Raises ApiError (400)."""
        if len(sources) > MAX_VIDEOS:
            raise bad_request(f"{len(sources)} videos in one request, this server reads {MAX_VIDEOS}", "messages")
        found: list[Video] = []
        room, pixels = Room(max_bytes, max_context), MAX_SOURCE_PIXELS
        for number, source in enumerate(sources, 1):
            try:
                if source.frames:
                    frames, seen = self._pictures(source, load, room, pixels)
                    pixels -= seen
                else:
                    frames = decode(load(source.urls[0]), Order(self.processor, source.fps, room))
            except TooManyTokens as fault:
                raise bad_request(
                    f"this model's context is {max_context} tokens; videos 1 to {number} take "
                    f"{max_context - room.tokens + fault.tokens}",
                    "messages",
                    "context_length_exceeded",
                ) from fault
            except ImageFault as fault:
                raise bad_request(f"video {number}: {fault}", "messages", "invalid_video") from fault
            found.append(self._video(frames))
            taken = len(found[-1].groups) * self.processor.image.tokens(frames.height, frames.width)
            room = Room(room.nbytes - len(frames.data), room.tokens - taken)
        return found

    def _pictures(
        self, source: VideoSource, load: Callable[[str], bytes], room: Room, max_pixels: int
    ) -> tuple[Frames, int]:
        """(frames that come one by one, their pixels before resizing). Raises ImageFault."""
        count, processor = len(source.urls), self.processor
        if count > processor.max_frames:
            raise ImageFault(f"{count} frames, at most {processor.max_frames} are read")
        opened: list[Picture] = []
        for number, url in enumerate(source.urls, 1):
            try:
                opened.append(Picture(load(url), _OneSize(processor, count, room)))
            except TooManyTokens:
                raise
            except ImageFault as fault:
                raise ImageFault(f"frame {number}: {fault}") from fault
            one = opened[-1]
            if (one.height, one.width, one.source_size) != (opened[0].height, opened[0].width, opened[0].source_size):
                raise ImageFault(
                    f"frame {number} is another size than the first: {one.source_size}, {opened[0].source_size}"
                )
            if sum(picture.source_pixels for picture in opened) > max_pixels:
                raise ImageFault(f"the frames have more than {MAX_SOURCE_PIXELS} pixels before resizing")
        data = b"".join(picture.pixels().tobytes() for picture in opened)
        rate = processor.fps if source.fps is None else source.fps
        seen = sum(picture.source_pixels for picture in opened)
        return Frames(opened[0].height, opened[0].width, list(range(count)), rate, data), seen

    def _video(self, frames: Frames) -> Video:
        span, size = self.processor.image.temporal, 3 * frames.height * frames.width
        data = frames.data + frames.data[-size:] * (-len(frames.indices) % span)
        step = span * size
        parts = [data[begin : begin + step] for begin in range(0, len(data), step)]
        groups = [Pixels(frames.height, frames.width, part, span) for part in parts]
        return Video(groups, self.processor.times(frames.indices, frames.rate))


@dataclass(frozen=True)
class _OneSize:
    """The size of frames of which there are `count`."""

    processor: VideoProcessor
    count: int
    room: Room

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        return self.processor.fit(self.count, height, width, self.room)


def spell_videos(text: str, videos: list[Video], ends: list[int]) -> tuple[str, list[int]]:
    """The text with each video's pad spelled out, and where the places `ends` (characters of `text`) have gone.

    Raises ApiError (400) if there are not as many pads as videos.
    """
    pieces = text.split(VIDEO_PAD)
    if len(pieces) - 1 != len(videos):
        raise bad_request(
            f"the prompt has {len(pieces) - 1} times {VIDEO_PAD}, the request {len(videos)} videos: write no {VIDEO_PAD} into a "
            "text, and videos only where the chat template takes them",
            "messages",
        )
    parts, moved, begin = [pieces[0]], list(ends), len(pieces[0])
    for video, piece in zip(videos, pieces[1:], strict=True):
        spelled = video.spelled
        parts += [spelled, piece]
        added = len(spelled) - len(VIDEO_PAD)
        begin += len(VIDEO_PAD)
        moved = [there + added if end >= begin else there for there, end in zip(moved, ends, strict=True)]
        begin += len(piece)
    return "".join(parts), moved
