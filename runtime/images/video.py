"""The family's video processor: which frames are looked at, the size they are brought to, and when they are shown.

As in transformers' Qwen3VLVideoProcessor: frames at an even pace, one size for all so that time times area stays within limits,
and as many frames as a patch spans form one group, which stands in the prompt behind its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint.directory import read_json
from ...checkpoint.errors import InputError
from .decoding import ImageFault
from .processor import MAX_ASPECT, ImageProcessor

SETTINGS_FILE = "video_preprocessor_config.json"
MIN_PIXELS, MAX_PIXELS = 128 * 32 * 32, 768 * 32 * 32  # of all frames together, where the file says nothing
_MOST_FRAMES = 4096
_CAP_FLOOR = 1.05  # of the least pixels: what a frame may have, however many there are


class TooManyTokens(ImageFault):
    """A video that takes more `tokens` than there is room for."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"it takes {tokens} tokens")
        self.tokens = tokens


@dataclass(frozen=True)
class Room:
    """What the frames of a video may take at most: bytes after resizing, tokens."""

    nbytes: int
    tokens: int


@dataclass(frozen=True)
class VideoProcessor:
    """What video_preprocessor_config.json says. `image`: patches, and what a frame may have at most.

    min, max_pixels   of all frames together after resizing
    fps               frames a second that are looked at
    min, max_frames   that are looked at of one video, as far as it has them
    frame_tokens      with `capped`: that a frame may cost
    """

    image: ImageProcessor
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    capped: bool = False
    frame_tokens: int = 768

    @staticmethod
    def read(directory: Path, image: ImageProcessor) -> VideoProcessor | None:
        """Settings of `directory`, None where it has none. Raises InputError for values that make no sense.

        A group of frames becomes patches as a picture does: pace and size are this file's, values those of the pictures.
        """
        path = directory / SETTINGS_FILE
        if not path.exists():
            return None
        found = read_json(path)
        if not isinstance(found, dict):
            raise InputError(f"{path}: not a JSON object.")
        for name, wanted in (
            ("patch_size", image.patch),
            ("merge_size", image.merge),
            ("temporal_patch_size", image.temporal),
            ("image_mean", list(image.mean)),
            ("image_std", list(image.std)),
            ("rescale_factor", image.scale),
            ("do_resize", True),
            ("do_rescale", True),
            ("do_normalize", True),
        ):
            if found.get(name) not in (None, wanted):
                raise InputError(f"{path}: {name} is {found[name]!r}, expected {wanted!r} as pictures have it.")
        size = found.get("size") if isinstance(found.get("size"), dict) else {}
        assert size is not None
        made = VideoProcessor(
            image,
            _number(path, "shortest_edge", size.get("shortest_edge"), MIN_PIXELS),
            _number(path, "longest_edge", size.get("longest_edge"), MAX_PIXELS),
            float(_number(path, "fps", found.get("fps"), 2.0, whole=False)),
            _number(path, "min_frames", found.get("min_frames"), 4),
            _number(path, "max_frames", found.get("max_frames"), 768),
            bool(found.get("cap_pixels_per_frame")),
            _number(path, "max_video_tokens", found.get("max_video_tokens"), 768),
        )
        least = image.temporal * image.factor**2
        if not least <= made.max_pixels or made.min_pixels > made.max_pixels:
            raise InputError(
                f"{path}: videos of {made.min_pixels} to {made.max_pixels} pixels; a token stands for {least}."
            )
        if not made.min_frames <= made.max_frames <= _MOST_FRAMES:
            raise InputError(f"{path}: {made.min_frames} to {made.max_frames} frames, at most {_MOST_FRAMES} are read.")
        return made

    def sample(self, total: int, rate: float, fps: float | None = None) -> list[int]:
        """Which of `total` frames, `rate` a second, are looked at; `fps`: another pace than the model's."""
        count = int(total / rate * (self.fps if fps is None else fps))
        count = min(max(count, self.min_frames), self.max_frames, total)
        return [int(place) for place in np.linspace(0, total - 1, count).round()]

    def size_for(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that each of so many frames is brought to. Raises ValueError for too few frames, and strips."""
        factor, temporal = self.image.factor, self.image.temporal
        if frames < temporal:
            raise ValueError(f"a video of {frames} frame; from {temporal} on it is one, send an image")
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(f"frames of {width} x {height} pixels are strips; at most {MAX_ASPECT} to 1 can be read")
        most = self.max_pixels
        if self.capped:
            share = min(self.frame_tokens * factor * factor, self.max_pixels // frames)
            most = max(share, int(self.min_pixels * _CAP_FLOOR)) * frames
        groups = round(frames / temporal) * temporal
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        most = min(most, self.image.max_pixels * groups)  # memory is planned for the largest picture
        if groups * high * wide > most:
            shrink = math.sqrt(frames * height * width / most)
            high = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif groups * high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return high, wide

    def fit(self, frames: int, height: int, width: int, room: Room) -> tuple[int, int]:
        """As `size_for`. Raises ImageFault where it does, and for more bytes than there is room for; TooManyTokens."""
        try:
            high, wide = self.size_for(frames, height, width)
        except ValueError as error:
            raise ImageFault(str(error)) from error
        if (tokens := self.groups(frames) * self.image.tokens(high, wide)) > room.tokens:
            raise TooManyTokens(tokens)
        if (size := 3 * high * wide * frames) > room.nbytes:
            raise ImageFault(f"{frames} frames have {size} bytes after resizing, at most {room.nbytes} are read")
        return high, wide

    def groups(self, frames: int) -> int:
        """Groups of frames, the last filled up with its last frame."""
        return -(-frames // self.image.temporal)

    def times(self, indices: list[int], rate: float) -> list[float]:
        """Seconds at which each group is shown: the middle between its first and last frame."""
        span = self.image.temporal
        filled = indices + [indices[-1]] * (-len(indices) % span)
        return [(filled[at] / rate + filled[at + span - 1] / rate) / 2 for at in range(0, len(filled), span)]


def _number(path: Path, name: str, value: Any, default: Any, whole: bool = True) -> Any:
    if value is None:
        return default
    good = type(value) is int or (not whole and type(value) is float)
    if not good or not 0 < value < 1 << 40:
        raise InputError(f"{path}: {name} is {value!r}, expected a number above 0.")
    return value
