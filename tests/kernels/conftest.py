"""Matrices in both encodings, and the CUDA source compiled for the host."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.kernels.build import CSRC
from duovolt.kernels.linear import Fp8Weight, Nvfp4Weight, Weight

EMULATOR = Path(__file__).with_name("emulator.hpp")


@dataclass
class Sample:
    """A weight on the CPU, and its decoded values float64 [N, K] from the codec, which shares nothing with kernels/."""

    weight: Weight
    exact: np.ndarray


def encoded(encoding: str, matrix: np.ndarray) -> Sample:
    """`matrix` float32 [N, K] quantised by the codec and laid out."""
    if encoding == "fp8":
        scale = fp8.row_scales(np.abs(matrix).max(axis=1))
        words = fp8.encode_rows(matrix, scale)
        exact = fp8.DECODE[words].astype(np.float64) * scale.astype(np.float64)[:, None]
        return Sample(Fp8Weight(_tiles("v100-fp8", words), torch.from_numpy(scale)), exact)
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


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """linear.cu as it stands, compiled for the host with an emulation of the GPU's threads and of m8n8k4."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++): the CUDA source cannot be run on the host")
    folder = tmp_path_factory.mktemp("host")
    for name in ("linear.cu", "decode.cuh"):
        shutil.copy(CSRC / name, folder)
    (folder / "volta.cuh").write_text("")  # its two instructions are the emulator's
    (folder / "host.cpp").write_text(f'#include "{EMULATOR}"\n#include "linear.cu"\n')
    library = folder / "host.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "host.cpp", "-o", str(library)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))
