"""Pictures to patches: transformers' own processor is the reference; hostile bytes are refused with numbers."""

import contextlib
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duovolt.checkpoint.errors import InputError
from duovolt.model.config import ModelConfig
from duovolt.runtime.images.decoding import MAX_IMAGE_BYTES, ImageFault, Picture
from duovolt.runtime.images.placing import Pixels, place
from duovolt.runtime.images.processor import ImageProcessor

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
VISION = ModelConfig.read(TINY).vision
assert VISION is not None
PROCESSOR = ImageProcessor.read(TINY, VISION)


def picture(width: int, height: int, kind: str = "PNG", **options: object) -> bytes:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, kind, **options)
    return out.getvalue()


def read(data: bytes) -> np.ndarray:
    return Picture(data, PROCESSOR).pixels()


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (1, 1), (700, 500), (31, 1500), (1000, 40), (513, 512)])
def test_patches_are_those_of_transformers(size: tuple[int, int]) -> None:
    """Same resizing (Pillow's bicubic on bytes), so the values differ by rounding alone: at most 1e-6."""
    processors = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    data = picture(*size)
    peer = processors.Qwen2VLImageProcessorPil(**json.loads((TINY / "preprocessor_config.json").read_text()))
    wanted = peer(Image.open(io.BytesIO(data)), return_tensors="np")
    pixels = read(data)
    found = PROCESSOR.patches(pixels[None])
    rows, columns = pixels.shape[0] // 16, pixels.shape[1] // 16
    assert wanted["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert found.shape == wanted["pixel_values"].shape and found.dtype == np.float32
    assert np.abs(found - wanted["pixel_values"]).max() <= 1e-6
    assert PROCESSOR.tokens(*pixels.shape[:2]) == rows * columns // 4


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_kinds(kind: str) -> None:
    data = picture(64, 96, kind)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(read(data), wanted)


def test_the_first_frame_of_an_animation() -> None:
    red, blue = (Image.new("RGB", (64, 64), colour) for colour in ("red", "blue"))
    out = io.BytesIO()
    red.save(out, "GIF", save_all=True, append_images=[blue])
    assert read(out.getvalue())[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = picture(64, 96, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(read(data), wanted)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claimed(width: int, height: int) -> bytes:
    """A PNG that says it is of this size, and holds nothing of it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that are no PNG"),
        (b"GIF89a", "6 bytes that are no PNG"),
        (b"<svg/>", "6 bytes that are no PNG"),
        (b"\0" * (MAX_IMAGE_BYTES + 1), f"{MAX_IMAGE_BYTES + 1} bytes, at most {MAX_IMAGE_BYTES}"),
        (claimed(9000, 9000), "9000 x 9000 pixels, at most 67108864"),
        (claimed(30000, 30000), "more than 67108864 pixels"),
        (claimed(0, 5), "65 bytes that are no PNG"),
        (claimed(64, 64), "breaks off or is damaged"),
        (claimed(201, 1), "201 x 1 pixels are a strip"),
        (picture(640, 480)[:5000], "breaks off or is damaged"),
        (picture(640, 480, "JPEG")[:5000], "breaks off or is damaged"),
        (picture(640, 480, "WEBP", lossless=True)[:5000], "are no PNG"),
        (picture(64, 64, "BMP"), "are no PNG"),
    ],
)
def test_hostile_pictures(data: bytes, words: str) -> None:
    with pytest.raises(ImageFault) as caught:
        read(data)
    assert words in str(caught.value)


def test_no_bytes_end_in_anything_but_a_refusal() -> None:
    """Pictures with bytes changed or cut anywhere are read or refused, nothing else."""
    generator = np.random.default_rng(7)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = picture(40, 40, kind)
        for _ in range(60):
            broken = bytearray(whole[: generator.integers(1, len(whole) + 1)])
            for index in generator.integers(0, len(broken), 3):
                broken[index] = generator.integers(0, 256)
            with contextlib.suppress(ImageFault):
                assert read(bytes(broken)).shape[2] == 3


@pytest.mark.parametrize(
    "settings",
    [{"patch_size": 14}, {"resample": 2}, {"do_resize": False}, {"image_std": [0, 1, 1]}, {"image_mean": [0.5]},
     {"min_pixels": 9000, "max_pixels": 5000}, {"size": {"longest_edge": "x"}}, {"rescale_factor": 0}, []],
)  # fmt: skip
def test_settings_that_the_tower_cannot_keep(settings: object, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="preprocessor_config"):
        ImageProcessor.read(tmp_path, VISION)  # type: ignore[arg-type]


def test_without_a_file_the_family_decides(tmp_path: Path) -> None:
    found = ImageProcessor.read(tmp_path, VISION)  # type: ignore[arg-type]
    assert (found.min_pixels, found.max_pixels, found.mean) == (65536, 16777216, (0.5, 0.5, 0.5))


def test_positions_around_a_picture() -> None:
    """Two words, a picture of 2 x 3 tokens, a word: what follows goes on after the larger extent."""
    placed = place([7, 8, 99, 9], {99: [Pixels(64, 96, b"")]}, 32)
    assert placed.ids == [7, 8, *[99] * 6, 9]
    assert placed.rope_positions == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert place([7, 8], {99: []}, 32).rope_positions is None
