"""Bytes of a picture from anybody to pixels. What a decoder would have to allocate is judged before it starts."""

from __future__ import annotations

import io
from typing import Protocol

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGE_PIXELS = 64 << 20  # 8192 x 8192: at most 256 MB while it is decoded
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


class ImageFault(ValueError):
    """A picture that is not read, and why."""


class Sizes(Protocol):
    """What a picture is brought to: an `ImageProcessor`, or the size of a video's frames."""

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Raises ValueError for what cannot be read."""
        ...


class Picture:
    """A picture whose header has been read; `height` and `width` are those it will be brought to."""

    def __init__(self, data: bytes, processor: Sizes) -> None:
        """Raises ImageFault: too many bytes or pixels, no picture of a known kind, no pixels, a strip."""
        if len(data) > MAX_IMAGE_BYTES:
            raise ImageFault(f"{len(data)} bytes, at most {MAX_IMAGE_BYTES} are read")
        try:
            self._image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise ImageFault(f"more than {MAX_IMAGE_PIXELS} pixels") from error
        except Exception as error:  # the library's parsers raise whatever a broken header makes them raise
            raise ImageFault(f"{len(data)} bytes that are no {', '.join(FORMATS)} picture") from error
        width, height = self._image.size
        self.source_pixels = width * height
        self.source_size = f"{width} x {height}"
        if not self.source_pixels:
            raise ImageFault(f"{width} x {height} pixels: nothing to see")
        if self.source_pixels > MAX_IMAGE_PIXELS:
            raise ImageFault(f"{width} x {height} pixels, at most {MAX_IMAGE_PIXELS} are read")
        self._turn = self._orientation()
        if self._turn in _SIDEWAYS:
            width, height = height, width
        try:
            self.height, self.width = processor.size_for(height, width)
        except ImageFault:
            raise
        except ValueError as error:
            raise ImageFault(str(error)) from error

    def pixels(self) -> np.ndarray:
        """The first frame upright, without transparency, resized (bicubic): uint8 [height, width, 3]. Raises ImageFault."""
        try:
            self._image.seek(0)
            upright = self._image.convert("RGB")
        except Exception as error:  # as above; most often OSError: the file ends too early
            raise ImageFault(f"the picture breaks off or is damaged ({str(error)[:80]})") from error
        if self._turn in _TURNS:
            upright = upright.transpose(_TURNS[self._turn])
        return np.asarray(upright.resize((self.width, self.height), Image.Resampling.BICUBIC))

    def _orientation(self) -> int:
        """The EXIF orientation, 1 (upright) where there is none that can be read."""
        try:
            return int(self._image.getexif().get(_ORIENTATION, 1))
        except Exception:  # a damaged EXIF block says nothing, as every viewer has it
            return 1
