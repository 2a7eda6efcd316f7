"""The worked example of docs/layouts.md, byte for byte, and that the page says the same."""

from pathlib import Path

import numpy as np

from duovolt.checkpoint.encodings import nvfp4
from duovolt.checkpoint.layouts import LAYOUTS

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def stored_at(layout: str, canonical: np.ndarray, offset: int, count: int) -> str:
    return LAYOUTS[layout].apply(canonical).tobytes()[offset : offset + count].hex(" ")


def test_nvfp4_words():
    codes = np.zeros((64, 32), np.uint8)
    codes[33, 16:] = np.arange(16)
    words = nvfp4.pack(codes)
    canonical, stored = "10 32 54 76 98 ba dc fe", "20 64 31 75 a8 ec b9 fd"
    assert words[33, 8:].tobytes().hex(" ") == canonical
    assert stored_at("v100-nvfp4", words, 776, 8) == stored
    assert all(f"`{text}`" in PAGE for text in (canonical, stored)) and "= 776" in PAGE


def test_fp8_words():
    words = np.zeros((64, 32), np.uint8)
    words[33, 16:] = 0x30 + np.arange(16)
    stored = "30 32 31 33 34 36 35 37 38 3a 39 3b 3c 3e 3d 3f"
    assert stored_at("v100-fp8", words, 1552, 16) == stored
    assert f"`{stored}`" in PAGE and "= 1552" in PAGE


def test_block_scale():
    scales = np.zeros((64, 2), np.uint8)
    scales[33, 1] = 0x38
    assert stored_at("v100-scale", scales, 97, 1) == "38"
    assert np.count_nonzero(LAYOUTS["v100-scale"].apply(scales)) == 1 and "= 97" in PAGE
