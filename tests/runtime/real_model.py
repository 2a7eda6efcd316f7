"""Ranks of a real, tiny model: the fixture with a vocabulary large enough for the tests' tokenizer, converted and split."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .stub_model import make_directory

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny_qwen3_5" / "checkpoint"
VOCABULARY = 320
HEADS = ("model.language_model.embed_tokens.weight", "lm_head.weight")


def make_source(directory: Path) -> Path:
    """A plain checkpoint with the tests' tokenizer."""
    make_directory(directory)
    tensors = {
        name: tensor for file in sorted(FIXTURE.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    generator = torch.Generator().manual_seed(1)
    for name in HEADS:
        rows = torch.randn(VOCABULARY, tensors[name].shape[1], generator=generator) * tensors[name].float().std()
        rows[: tensors[name].shape[0]] = tensors[name].float()
        tensors[name] = rows.bfloat16()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((FIXTURE / "config.json").read_text())
    config["text_config"]["vocab_size"] = VOCABULARY
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def duovolt(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "duovolt", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, timeout=120
    )


def make_ranks(folder: Path, size: int) -> Path:
    """`folder`/ranks-SIZE, made by the commands that a user runs."""
    if not (folder / "source").exists():
        make_source(folder / "source")
        duovolt("convert", folder / "source", folder / "converted", "--quiet")
    duovolt("shard", folder / "converted", folder / f"ranks-{size}", "--tp", str(size), "--quiet")
    return folder / f"ranks-{size}"
