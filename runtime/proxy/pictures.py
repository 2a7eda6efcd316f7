"""The pictures of a request: from data URLs (or, where allowed, from the web) into the prompt."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from ...model.config import ModelConfig
from ..images.decoding import MAX_IMAGE_BYTES, ImageFault, Picture
from ..images.placing import Placed, place
from ..images.processor import ImageProcessor
from .errors import bad_request
from .image_urls import fetch_image
from .prompt import encode_prompt
from .tokenizer import TextTokenizer

IMAGE_PAD = "<|image_pad|>"
MAX_IMAGES = 64
MAX_SOURCE_PIXELS = 256 << 20  # of all pictures of a request, before resizing: seconds of decoding
MAX_PIXEL_BYTES = 64 << 20  # of all pictures of a request, after resizing, times the answers asked for
NO_TOWER = f"the model has no vision tower, or its tokenizer no {IMAGE_PAD}"


@dataclass(frozen=True)
class PictureReader:
    """How this server reads pictures. `pad`: the id of `<|image_pad|>`; `by_url`: it may fetch them."""

    processor: ImageProcessor
    pad: int
    by_url: bool

    @staticmethod
    def of(directory: Path, config: ModelConfig | None, tokenizer: TextTokenizer, by_url: bool) -> PictureReader | None:
        """None for a model that reads text only. Raises InputError for settings that are not the model's."""
        if config is None or config.vision is None or config.image_token is None:
            return None
        if tokenizer.marker(IMAGE_PAD) != config.image_token:
            return None
        return PictureReader(ImageProcessor.read(directory, config.vision), config.image_token, by_url)

    def read(self, urls: list[str], max_context: int, answers: int = 1) -> list[tuple[int, int, bytes]]:
        """Height, width and pixels of each picture. Raises ApiError (400) with the number of the one at fault."""
        if len(urls) > MAX_IMAGES:
            raise bad_request(f"{len(urls)} images in one request, this server reads {MAX_IMAGES}", "messages")
        opened = []
        for number, url in enumerate(urls, 1):
            try:
                opened.append(Picture(self._bytes(url), self.processor))
            except ImageFault as fault:
                raise bad_request(f"image {number}: {fault}", "messages", "invalid_image") from fault
        tokens = sum(self.processor.tokens(one.height, one.width) for one in opened)
        if tokens > max_context:
            raise bad_request(
                f"this model's context is {max_context} tokens; the images take {tokens}",
                "messages",
                "context_length_exceeded",
            )
        if (pixels := sum(one.source_pixels for one in opened)) > MAX_SOURCE_PIXELS:
            raise bad_request(
                f"the images have {pixels} pixels together, at most {MAX_SOURCE_PIXELS} are read", "messages"
            )
        if (size := answers * sum(3 * one.height * one.width for one in opened)) > MAX_PIXEL_BYTES:
            raise bad_request(
                f"the images have {size} bytes after resizing, in {answers} answers; at most {MAX_PIXEL_BYTES} are read",
                "messages",
            )
        found = []
        for number, one in enumerate(opened, 1):
            try:
                found.append((one.height, one.width, one.pixels().tobytes()))
            except ImageFault as fault:
                raise bad_request(f"image {number}: {fault}", "messages", "invalid_image") from fault
        return found

    def _bytes(self, url: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self.by_url:
                raise ImageFault("this server fetches no URLs (--allow-image-urls); send a data URL")
            return fetch_image(scheme + url[len(scheme) :])
        head, comma, data = url.partition(",")
        if scheme != "data" or not comma or not head.lower().endswith(";base64"):
            raise ImageFault(f"{url[:40]!r} is not a URL of the form data:image/png;base64,...")
        if len(data) > 4 * (MAX_IMAGE_BYTES // 3 + 1):
            raise ImageFault(f"about {3 * len(data) // 4} bytes, at most {MAX_IMAGE_BYTES} are read")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageFault(f"the data is not base64 ({error})") from error


def encode_with_pictures(
    text: str,
    urls: list[str],
    reader: PictureReader | None,
    tokenizer: TextTokenizer,
    max_context: int,
    answers: int = 1,
) -> Placed:
    """The ids of a rendered prompt, each `<|image_pad|>` in it given the tokens of its picture. Raises ApiError (400)."""
    return place_pictures(encode_prompt(tokenizer, text, max_context), urls, reader, max_context, answers)


def place_pictures(
    ids: list[int], urls: list[str], reader: PictureReader | None, max_context: int, answers: int = 1
) -> Placed:
    """As encode_with_pictures, from the ids of the rendered prompt."""
    if reader is None:
        return Placed(ids, [], None)
    pads = ids.count(reader.pad)
    if pads != len(urls):
        raise bad_request(
            f"the prompt has {pads} times {IMAGE_PAD}, the request {len(urls)} images: write no {IMAGE_PAD} into a text, "
            "and images only where the chat template takes them",
            "messages",
        )
    return place(ids, reader.pad, reader.read(urls, max_context, answers), reader.processor.factor)
