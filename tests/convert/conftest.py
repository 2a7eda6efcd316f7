"""Sources to convert: the peers' tiny checkpoint, and small variations of it."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from duovolt.tests.support.forks import Commands

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A private copy of the tiny checkpoint of five shards."""
    target = tmp_path / "source"
    shutil.copytree(FIXTURE, target)
    return target


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    made = Commands("convert", "shard", "dequantize")
    yield made
    made.close()


@pytest.fixture
def command(tmp_path: Path, commands: Commands) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `duovolt ...` as a process, in an empty directory."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return commands.run([str(argument) for argument in arguments], tmp_path, **environment)

    return run


def shard_of(directory: Path, tensor: str) -> Path:
    """The file that the index names for a tensor."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][tensor]


def rewrite(directory: Path, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace one BF16 tensor, given and returned as uint16 words."""
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    path = shard_of(directory, tensor)
    tensors = load_torch(path)
    words = change(tensors[tensor].view(torch.uint16).numpy().copy())
    tensors[tensor] = torch.from_numpy(words).view(torch.bfloat16)
    save_torch(tensors, path, metadata={"format": "pt"})


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


__all__ = ["FIXTURE", "contents", "load_file", "rewrite", "save_file", "shard_of"]
