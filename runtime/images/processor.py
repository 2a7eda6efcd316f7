"""The family's image processor: the size a picture is brought to, and its patches in the order of the vision tower."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint.directory import read_json
from ...checkpoint.errors import InputError
from ...model.config import VisionConfig

SETTINGS_FILE = "preprocessor_config.json"
MIN_PIXELS, MAX_PIXELS = 256 * 256, 4096 * 4096  # the family's, where the file says nothing
MAX_ASPECT = 200
_BICUBIC = 3
_CHANNELS = 3


@dataclass(frozen=True)
class ImageProcessor:
    """What preprocessor_config.json and the vision tower say. `patch`, `merge`: edges in pixels and in patches.

    temporal            frames a patch spans; of a picture, which stands still, all are the same
    min, max_pixels     of the picture after resizing
    scale, mean, std    a channel's value is (pixel * scale - mean) / std
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def read(directory: Path, vision: VisionConfig) -> ImageProcessor:
        """Settings of `directory`. Raises InputError for values that make no sense or are not those of the tower."""
        path = directory / SETTINGS_FILE
        found = read_json(path) if path.exists() else {}
        if not isinstance(found, dict):
            raise InputError(f"{path}: not a JSON object.")
        if vision.in_channels != _CHANNELS:
            raise InputError(f"{directory}: the vision tower reads {vision.in_channels} channels, a picture has 3.")
        for name, wanted in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
            ("resample", _BICUBIC),
            ("do_resize", True),
            ("do_rescale", True),
            ("do_normalize", True),
        ):
            if found.get(name) not in (None, wanted):
                raise InputError(f"{path}: {name} is {found[name]!r}, expected {wanted!r}, which the model needs.")
        size = found.get("size") if isinstance(found.get("size"), dict) else {}
        assert size is not None
        factor = vision.patch_size * vision.spatial_merge_size
        least = _whole(path, "min_pixels", found.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS)
        most = _whole(path, "max_pixels", found.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS)
        if not least <= most or most < factor * factor:
            raise InputError(f"{path}: pictures of {least} to {most} pixels; a token stands for {factor * factor}.")
        return ImageProcessor(
            vision.patch_size,
            vision.spatial_merge_size,
            vision.temporal_patch_size,
            least,
            min(most, MAX_PIXELS),
            _number(path, "rescale_factor", found.get("rescale_factor", 1 / 255)),
            _numbers(path, "image_mean", found.get("image_mean")),
            _numbers(path, "image_std", found.get("image_std")),
        )

    @property
    def factor(self) -> int:
        """Pixels along the edge of the square that one token stands for."""
        return self.patch * self.merge

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Height and width a picture is brought to: whole tokens, pixels within the limits, shape nearly kept.

        Raises ValueError for a strip of more than 200 to 1.
        """
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(f"{width} x {height} pixels are a strip; at most {MAX_ASPECT} to 1 can be read")
        factor = self.factor
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return high, wide

    def tokens(self, height: int, width: int) -> int:
        """Tokens of a picture of this size after resizing."""
        return (height // self.factor) * (width // self.factor)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [F, H, W, 3], F 1 or `temporal` -> float32 [H W / patch^2, 3 * temporal * patch^2].

        Patches that become one token stand side by side: rows of tokens, tokens, then merge x merge patches.
        """
        mean, std = (np.array(channel, dtype=np.float32) for channel in (self.mean, self.std))
        values: np.ndarray = (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std
        count, high, wide = pixels.shape[0], pixels.shape[1] // self.patch, pixels.shape[2] // self.patch
        shape = (
            count,
            high // self.merge,
            self.merge,
            self.patch,
            wide // self.merge,
            self.merge,
            self.patch,
            _CHANNELS,
        )
        blocks = values.reshape(shape).transpose(1, 4, 2, 5, 7, 0, 3, 6)
        frames = np.broadcast_to(
            blocks, (*blocks.shape[:5], self.temporal, *blocks.shape[6:])
        )  # a picture stands still
        return np.ascontiguousarray(frames.reshape(high * wide, -1))


def _whole(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise InputError(f"{path}: {name} is {value!r}, expected a whole number of pixels.")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < abs(value) < 1e6:
        raise InputError(f"{path}: {name} is {value!r}, expected a number.")
    return float(value)


def _numbers(path: Path, name: str, value: Any) -> tuple[float, ...]:
    if value is None:
        return (0.5,) * _CHANNELS
    if not isinstance(value, list) or len(value) != _CHANNELS:
        raise InputError(f"{path}: {name} is {value!r}, expected three numbers.")
    for entry in value:
        low = 1e-6 if name == "image_std" else 0.0
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not low <= entry < 1e6:
            raise InputError(f"{path}: {name} is {value!r}, expected three numbers.")
    return tuple(float(entry) for entry in value)
