"""Layouts: bijections of bytes, described once more here word by word, that commute with cuts at tile edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duovolt.checkpoint.encodings import nvfp4
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.layouts import COLUMNS, LAYOUTS, ROWS, layout_named, stored_form, to_canonical

NAMES = sorted(LAYOUTS)


def some_bytes(rows: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


@given(name=st.sampled_from(NAMES), bands=st.integers(1, 3), groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_bijective_and_same_size(name: str, bands: int, groups: int, seed: int) -> None:
    layout = LAYOUTS[name]
    words = some_bytes(bands * ROWS, groups * layout.bytes_per_group, seed)
    tiles = layout.apply(words)
    assert tiles.shape == layout.shape(*words.shape) and tiles.nbytes == words.nbytes
    np.testing.assert_array_equal(layout.invert(tiles), words)
    np.testing.assert_array_equal(layout.apply(layout.invert(tiles)), tiles)
    np.testing.assert_array_equal(to_canonical(tiles, name, words.shape), words)


@given(name=st.sampled_from(NAMES), bands=st.integers(2, 4), groups=st.integers(2, 5), data=st.data())
def test_commutes_with_cuts_at_tile_edges(name: str, bands: int, groups: int, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    words = some_bytes(bands * ROWS, groups * layout.bytes_per_group)
    row, column = data.draw(st.integers(1, bands - 1)), data.draw(st.integers(1, groups - 1))
    tiles = layout.apply(words)
    np.testing.assert_array_equal(layout.apply(words[row * ROWS :]), tiles[row:])
    cut = column * layout.bytes_per_group
    np.testing.assert_array_equal(layout.apply(np.ascontiguousarray(words[:, :cut])), tiles[:, :column])


def test_fp8_byte_by_byte() -> None:
    """[N/32][K/16][32 rows][16 bytes], bytes k0..k3 of each word in the order 0, 2, 1, 3."""
    words = some_bytes(64, 48)
    tiles = LAYOUTS["v100-fp8"].apply(words)
    for band, group, row, byte in np.ndindex(2, 3, 32, 16):
        k = byte // 4 * 4 + (0, 2, 1, 3)[byte % 4]
        assert tiles[band, group, row, byte] == words[band * 32 + row, group * 16 + k]


def test_nvfp4_code_by_code() -> None:
    """[N/32][K/16][32 rows][8 bytes]; the nibbles of a word, low first, hold codes 0 2 4 6 1 3 5 7."""
    words = some_bytes(64, 24)
    codes = nvfp4.unpack(words)
    tiles = LAYOUTS["v100-nvfp4"].apply(words)
    for band, group, row, byte in np.ndindex(2, 3, 32, 8):
        for half in range(2):
            nibble = byte % 4 * 2 + half
            k = group * 16 + byte // 4 * 8 + (0, 2, 4, 6, 1, 3, 5, 7)[nibble]
            assert tiles[band, group, row, byte] >> (4 * half) & 15 == codes[band * 32 + row, k]


def test_scales_in_tiles() -> None:
    """[N/32][K/16][32]: one byte a row of a tile."""
    words = some_bytes(64, 3)
    tiles = LAYOUTS["v100-scale"].apply(words)
    assert tiles.shape == (2, 3, 32)
    for band, group, row in np.ndindex(2, 3, 32):
        assert tiles[band, group, row] == words[band * 32 + row, group]


def test_what_does_not_fill_tiles_stays_canonical() -> None:
    assert stored_form("v100", "fp8_e4m3", "words", (64, 64)) == ("v100-fp8", (2, 4, 32, 16))
    assert stored_form("v100", "nvfp4", "words", (64, 32)) == ("v100-nvfp4", (2, 4, 32, 8))
    assert stored_form("v100", "nvfp4", "block_scale", (64, 4)) == ("v100-scale", (2, 4, 32))
    for shape in ((48, 64), (64, 24), (0, 64)):
        assert stored_form("v100", "fp8_e4m3", "words", shape) == ("canonical", shape)
    assert stored_form("canonical", "fp8_e4m3", "words", (64, 64)) == ("canonical", (64, 64))
    assert stored_form("v100", "fp8_e4m3", "row_scale", (64,)) == ("canonical", (64,))
    assert COLUMNS == 16
    with pytest.raises(ValueError, match="do not fill"):
        LAYOUTS["v100-fp8"].apply(some_bytes(33, 16))


def test_unknown_layouts_and_shapes() -> None:
    """S11: a layout is known by name, never guessed from a shape."""
    with pytest.raises(InputError, match="v200-fp8"):
        layout_named("v200-fp8")
    with pytest.raises(InputError, match=r"\[64, 64\]"):
        to_canonical(some_bytes(64, 64), "v100-fp8", (64, 64))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_warps_load_of_a_tile_is_a_run_of_whole_sectors(name: str) -> None:
    """What a warp loads, one row of the tile a lane, in lane order; neighbouring tiles follow without a gap."""
    layout, sector = LAYOUTS[name], 32
    size = layout.bytes_per_group
    runs = []
    for band, group in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0)):
        words = np.zeros((64, 4 * size), np.uint8)
        words[32 * band : 32 * band + 32, group * size : (group + 1) * size] = 0xFF
        touched = np.flatnonzero(layout.apply(words).reshape(-1))
        assert len(touched) == 32 * size and touched[-1] - touched[0] + 1 == len(touched)
        assert touched[0] % sector == 0 and len(touched) % sector == 0
        runs.append(touched[0])
        words[:] = 0
        words[32 * band + 7, group * size : (group + 1) * size] = 0xFF  # lane 7 holds row 7
        assert np.flatnonzero(layout.apply(words).reshape(-1)).tolist() == list(
            range(touched[0] + 7 * size, touched[0] + 8 * size)
        )
    assert np.diff(runs).tolist() == [32 * size] * 4
