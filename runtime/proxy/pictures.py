"""The pictures of a request, beside its videos: from data URLs (or, where allowed, from the web) into the prompt."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...model.config import ModelConfig
from ..images.decoding import MAX_IMAGE_BYTES, ImageFault, Picture
from ..images.placing import Pixels, Placed, place
from ..images.processor import ImageProcessor
from .errors import bad_request
from .image_urls import Fetches
from .media import Media
from .prompt import encode_prompt
from .tokenizer import TextTokenizer
from .videos import VIDEO_PAD, Video, VideoReader, spell_videos

IMAGE_PAD = "<|image_pad|>"
MAX_IMAGES = 64
MAX_SOURCE_PIXELS = 256 << 20  # of all pictures of a request, before resizing: seconds of decoding
MAX_PIXEL_BYTES = 80 << 20  # of all pictures and frames of a request, after resizing, times the answers asked for
NO_TOWER = f"the model has no vision tower, or its tokenizer no {IMAGE_PAD} with the image_token_id of config.json"


@dataclass(frozen=True)
class PictureReader:
    """How this server reads pictures. `pad`: the id of `<|image_pad|>`; `by_url`: it may fetch them; `videos` None: no videos."""

    processor: ImageProcessor
    pad: int
    by_url: bool
    videos: VideoReader | None = None

    @staticmethod
    def of(directory: Path, config: ModelConfig | None, tokenizer: TextTokenizer, by_url: bool) -> PictureReader | None:
        """None for a model that reads text only. Raises InputError for settings that are not the model's."""
        if config is None or config.vision is None or config.image_token is None:
            return None
        if tokenizer.marker(IMAGE_PAD) != config.image_token:
            return None
        processor = ImageProcessor.read(directory, config.vision)
        videos = VideoReader.of(directory, config, processor, tokenizer)
        return PictureReader(processor, config.image_token, by_url, videos)

    @property
    def pads(self) -> dict[str, int]:
        """Tokens that stand for what is shown."""
        return {IMAGE_PAD: self.pad} | ({} if self.videos is None else {VIDEO_PAD: self.videos.pad})

    def read(
        self, urls: list[str], load: Callable[[str], bytes], max_context: int, max_bytes: int, answers: int = 1
    ) -> list[Pixels]:
        """The pictures; `load` as `loader` gives it, `max_bytes` after resizing, times the answers.

        Raises ApiError (400) naming the one at fault.
        """
        if len(urls) > MAX_IMAGES:
            raise bad_request(f"{len(urls)} images in one request, this server reads {MAX_IMAGES}", "messages")
        opened = []
        for number, url in enumerate(urls, 1):
            try:
                opened.append(Picture(load(url), self.processor))
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
        if (size := answers * sum(3 * one.height * one.width for one in opened)) > max_bytes:
            raise bad_request(
                f"the images have {size} bytes after resizing, in {answers} answers; at most {max_bytes} are read",
                "messages",
            )
        found = []
        for number, one in enumerate(opened, 1):
            try:
                found.append(Pixels(one.height, one.width, one.pixels().tobytes()))
            except ImageFault as fault:
                raise bad_request(f"image {number}: {fault}", "messages", "invalid_image") from fault
        return found

    def loader(self) -> Callable[[str], bytes]:
        """What a URL of one request stands for: its data, or what is behind it where that is allowed. It raises ImageFault."""
        fetches = Fetches()
        return lambda url: self._bytes_of(url, fetches)

    def _bytes_of(self, url: str, fetches: Fetches) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self.by_url:
                raise ImageFault("this server fetches no URLs (--allow-image-urls); send a data URL")
            return fetches.fetch(scheme + url[len(scheme) :])
        head, comma, data = url.partition(",")
        if scheme != "data" or not comma or not head.lower().endswith(";base64"):
            raise ImageFault(f"{url[:40]!r} is not a URL of the form data:image/png;base64,...")
        if len(data) > 4 * (MAX_IMAGE_BYTES // 3 + 1):
            raise ImageFault(f"about {3 * len(data) // 4} bytes, at most {MAX_IMAGE_BYTES} are read")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageFault(f"the data is not base64 ({error})") from error


@dataclass(frozen=True)
class Shown:
    """A prompt's text with its videos spelled out, and what is to be shown in it. `ends`: places in the text; `load`: the
    images' URLs, within the time that the videos' have left; None where no pictures are read."""

    text: str
    ends: list[int]
    images: list[str]
    videos: list[Video]
    load: Callable[[str], bytes] | None


def show(
    text: str, media: Media, reader: PictureReader | None, max_context: int, answers: int = 1, ends: Sequence[int] = ()
) -> Shown:
    """Read the videos, whose times stand in the text. Raises ApiError (400)."""
    load = None if reader is None else reader.loader()
    if reader is None or reader.videos is None or load is None:
        return Shown(text, list(ends), media.images, [], load)
    videos = reader.videos.read(media.videos, load, max_context, MAX_PIXEL_BYTES // answers)
    spelled, moved = spell_videos(text, videos, list(ends))
    return Shown(spelled, moved, media.images, videos, load)


def encode_with_pictures(
    text: str, media: Media, reader: PictureReader | None, tokenizer: TextTokenizer, max_context: int
) -> Placed:
    """The ids of a rendered prompt, each pad in it given the tokens of its picture or frames. Raises ApiError (400)."""
    shown = show(text, media, reader, max_context)
    return place_pictures(encode_prompt(tokenizer, shown.text, max_context), shown, reader, max_context)


def place_pictures(
    ids: list[int], shown: Shown, reader: PictureReader | None, max_context: int, answers: int = 1
) -> Placed:
    """As encode_with_pictures, from the ids of `shown.text`."""
    if reader is None or shown.load is None:
        return Placed(ids, [], None)
    pads = ids.count(reader.pad)
    if pads != len(shown.images):
        raise bad_request(
            f"the prompt has {pads} times {IMAGE_PAD}, the request {len(shown.images)} images: write no {IMAGE_PAD} into a "
            "text, and images only where the chat template takes them",
            "messages",
        )
    groups = [group for video in shown.videos for group in video.groups]
    taken = sum(reader.processor.tokens(group.height, group.width) for group in groups)
    room = MAX_PIXEL_BYTES - answers * sum(len(group.data) for group in groups)
    pictures = {reader.pad: reader.read(shown.images, shown.load, max_context - taken, room, answers)}
    if reader.videos is not None:
        pictures[reader.videos.pad] = groups
    return place(ids, pictures, reader.processor.factor)
