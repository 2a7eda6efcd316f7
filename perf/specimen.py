"""The checkpoints that `bench pipeline` works on: the 27B's matrices, as many layers as fill the wanted size."""

import os
from pathlib import Path
from typing import Any

from .shapes import QWEN_27B
from .synth import Specimen
from .synth import write_source as write_specimen


def configuration(layers: int) -> dict[str, Any]:
    """A config.json with the 27B's layer sizes, a small vocabulary, one MTP layer and no vision tower."""
    text = {"num_hidden_layers": layers, "vocab_size": 32768, "full_attention_interval": min(4, layers)}
    plain = {key: value for key, value in QWEN_27B.items() if key != "vision_config"}
    return plain | {"text_config": QWEN_27B["text_config"] | text}


def _specimen(layers: int, seed: int, release: str) -> Specimen:
    return Specimen(configuration(layers), release, seed, sparse=False)


def layers_for(nbytes: int, release: str = "bf16") -> int:
    """The number of layers, at least two (one of each kind), whose checkpoint comes nearest to `nbytes` from below."""
    layers = 2
    while _specimen(layers + 1, 0, release).nbytes <= nbytes:
        layers += 1
    return layers


def write_source(directory: Path, nbytes: int, seed: int = 0, release: str = "bf16") -> int:
    """Write a source of about `nbytes` in the form of a release into a new directory; the bytes of its tensors.

    Raises InputError if the directory is not empty, EnvironmentFault if the disk is too small.
    """
    specimen = _specimen(layers_for(nbytes, release), seed, release)
    return write_specimen(directory, specimen, os.cpu_count() or 1, lambda count: None)
