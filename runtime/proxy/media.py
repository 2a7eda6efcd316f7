"""What a request shows beside its text: pictures and videos as its messages name them, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import bad_request

MAX_RATE = 1000.0


@dataclass(frozen=True)
class VideoSource:
    """The URL of a file, or those of `frames`. `fps`: frames a second; of a file those to look at, of frames their pace."""

    urls: list[str]
    fps: float | None = None
    frames: bool = False


@dataclass
class Media:
    """Filled while messages are read."""

    images: list[str] = field(default_factory=list)
    videos: list[VideoSource] = field(default_factory=list)


def read_video(part: dict[str, Any], where: str) -> VideoSource:
    """A part of type `video_url` (an object with a url, or the bare URL) or `video` (a URL, or a list of frames' URLs).

    `fps` stands beside either, or in the object. A data URL may hold several frames, with commas between. Raises ApiError.
    """
    kind = str(part["type"])
    value = part.get(kind)
    fps = part.get("fps")
    if isinstance(value, dict):
        fps = value.get("fps", fps)
        value = value.get("url")
    frames, urls = isinstance(value, list), [value] if isinstance(value, str) else value
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise bad_request(f"{where}.{kind}: expected an object with a url, or a list of frames' URLs", "messages")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_RATE):
        raise bad_request(f"{where}: fps is {fps!r}, expected frames a second, up to {MAX_RATE:g}", "messages")
    if not frames and urls[0][:5].lower() == "data:" and urls[0].count(",") > 1:
        head, _, data = urls[0].partition(",")
        frames, urls = True, [f"{head},{frame}" for frame in data.split(",")]
    return VideoSource(urls, None if fps is None else float(fps), frames)
