"""Matrices in every encoding, and the CUDA sources compiled for the host."""

import ctypes
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.kernels.build import CSRC
from duovolt.kernels.linear import SOURCES
from duovolt.kernels.weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight
from duovolt.tests.support import hostbuild

EMULATOR = Path(__file__).with_name("emulator.hpp")
REPLACED = (
    "half.cuh",
    "shared.cuh",
    "volta.cuh",
    "ampere.cuh",
)  # instructions that C++ cannot name: the emulator has them
HOST_FLAGS = "DUOVOLT_TEST_HOST_FLAGS"  # more flags of the host's compiler, as test_races.py wants them
HOST_ARCHES = {"volta": 700, "ampere": 800, "hopper": 900}


@dataclass
class Sample:
    """A weight on the CPU, and its decoded values float64 [N, K] from the codec, which shares nothing with kernels/."""

    weight: Weight
    exact: np.ndarray


def encoded(encoding: str, matrix: np.ndarray) -> Sample:
    """`matrix` float32 [N, K] quantised by the codec and laid out."""
    if encoding in ("half", "bf16"):
        limit = 65504 if encoding == "half" else 3e38
        plain = torch.from_numpy(np.clip(matrix, -limit, limit))
        plain = plain.to(torch.float16 if encoding == "half" else torch.bfloat16)
        return Sample(HalfWeight.of(plain), plain.double().numpy())
    if encoding == "fp8":
        scale = fp8.row_scales(np.abs(matrix).max(axis=1))
        words = fp8.encode_rows(matrix, scale)
        exact = fp8.DECODE[words].astype(np.float64) * scale.astype(np.float64)[:, None]
        return Sample(Fp8Weight(_tiles("v100-fp8", words), torch.from_numpy(scale)), exact)
    if encoding == "fp8_blocks":
        rows, columns = matrix.shape
        grid = (-(-rows // 128), -(-columns // 128))
        padded = np.zeros((grid[0] * 128, grid[1] * 128), np.float32)
        padded[:rows, :columns] = np.abs(matrix)
        largest = padded.reshape(grid[0], 128, grid[1], 128).max(axis=(1, 3))
        scale = fp8.row_scales(largest.reshape(-1)).reshape(grid)
        spread = scale.repeat(128, 0).repeat(128, 1)[:rows, :columns]
        words = fp8.to_e4m3(matrix / spread)
        exact = fp8.DECODE[words].astype(np.float64) * spread.astype(np.float64)
        return Sample(Fp8BlockWeight(_tiles("v100-fp8", words), torch.from_numpy(scale)), exact)
    multiplier = np.float32(nvfp4.multiplier(float(np.abs(matrix).max())))
    words, block_scale = nvfp4.encode(matrix, multiplier)
    values = nvfp4.decode(words, fp8.DECODE[block_scale])
    weight = Nvfp4Weight(
        _tiles("v100-nvfp4", words), _tiles("v100-scale", block_scale), torch.tensor([multiplier], dtype=torch.float32)
    )
    return Sample(weight, values.astype(np.float64) * float(multiplier))


def _tiles(layout: str, words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(LAYOUTS[layout].apply(words))


@pytest.fixture(scope="session")
def encode() -> Callable[[str, np.ndarray], Sample]:
    return encoded


@pytest.fixture(scope="session", params=HOST_ARCHES)
def host_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The linear's sources as they stand, compiled for the host with an emulation of a GPU's threads and products."""
    folder = tmp_path_factory.mktemp("host")
    for path in (*CSRC.glob("*.cu*"), Path(__file__).with_name("entry.hpp")):
        shutil.copy(path, folder)
    for name in REPLACED:
        (folder / name).write_text("")
    main = (
        f'#define __CUDA_ARCH__ {HOST_ARCHES[request.param]}\n#include "{EMULATOR}"\n'
        + "".join(f'#include "{name}"\n' for name in SOURCES.values())
        + '#include "dequantise.cu"\n#include "entry.hpp"\n'
    )
    flags = ["-O1", "-pthread", *os.environ.get(HOST_FLAGS, "").split()]
    return ctypes.CDLL(str(hostbuild.build(folder, main, flags)))
