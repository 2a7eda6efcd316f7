"""Writes the Hugging Face checkpoint out of trained weights.

``python -m duovolt.tiny.export DATA TRAINED CHECKPOINT`` takes the tokenizer, ``heldout.txt`` and ``words.txt`` from
``DATA``, the weights and the record of the run from ``TRAINED``, adds a small random (seeded, untrained) vision tower, and writes
the checkpoint; the text files, ``corpus.json`` and ``training.json`` go beside it. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from .config import GENERATION, IMAGE_PROCESSOR, MODEL, TEXT, VIDEO_PROCESSOR, VISION
from .network import Network, parameter_name

SHARDS = 4


def vision_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the vision tower with its shape."""
    size, inner = VISION["hidden_size"], VISION["intermediate_size"]
    patch, frames, merged = (
        VISION["patch_size"],
        VISION["temporal_patch_size"],
        size * VISION["spatial_merge_size"] ** 2,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (size, VISION["in_channels"], frames, patch, patch),
        "patch_embed.proj.bias": (size,),
        "pos_embed.weight": (VISION["num_position_embeddings"], size),
    }
    layers = {
        "merger.norm": (size,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (VISION["out_hidden_size"], merged),
    }
    for block in range(VISION["depth"]):
        layers |= {
            f"blocks.{block}.{name}": shape
            for name, shape in {
                "norm1": (size,),
                "norm2": (size,),
                "attn.qkv": (3 * size, size),
                "attn.proj": (size, size),
                "mlp.linear_fc1": (inner, size),
                "mlp.linear_fc2": (size, inner),
            }.items()
        }
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def vision_weights(seed: int) -> dict[str, Tensor]:
    """Matrices normal with standard deviation 0.02, norms one, biases zero; BF16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(vision_shapes().items()):
        if name.endswith("bias"):
            weight = torch.zeros(shape)
        else:
            weight = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.02
        weights[name] = weight.bfloat16()
    return weights


def write_shards(weights: dict[str, Tensor], directory: Path) -> None:
    """``SHARDS`` safetensors files of about equal size, tensors in the order of their names, and the index."""
    total = sum(w.nbytes for w in weights.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name in sorted(weights):
        shards[min(SHARDS - 1, written * SHARDS // total)][name] = weights[name]
        written += weights[name].nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        (directory / file).write_bytes(save(shard, metadata={"format": "pt"}))
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def load_network(directory: Path) -> Network:
    """The network with a checkpoint's text and MTP weights, in float32."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        stored |= load_file(shard)
    network = Network(TEXT)
    network.load_state_dict({name: stored[parameter_name(name)].float() for name in network.state_dict()})
    return network.eval()


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m duovolt.tiny.export", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("trained", type=Path)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args(argv)
    directory: Path = args.checkpoint
    directory.mkdir(parents=True, exist_ok=True)
    weights = load_file(args.trained / "weights.safetensors") | vision_weights(seed=0)
    wrong = [name for name, weight in weights.items() if weight.dtype != torch.bfloat16 or not weight.isfinite().all()]
    if wrong:
        raise SystemExit(f"export: {wrong[0]} is not finite BF16; the training has failed, run it again")
    write_shards(weights, directory)
    write_json(directory / "config.json", MODEL)
    write_json(directory / "generation_config.json", GENERATION)
    write_json(directory / "preprocessor_config.json", IMAGE_PROCESSOR)
    write_json(directory / "video_preprocessor_config.json", VIDEO_PROCESSOR)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(args.data / "tokenizer" / file, directory / file)
    for file in (
        args.data / "heldout.txt",
        args.data / "words.txt",
        args.data / "corpus.json",
        args.trained / "training.json",
    ):
        shutil.copyfile(file, directory.parent / file.name)
    size = sum(
        file.stat().st_size
        for file in directory.parent.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    print(
        f"{directory}: {len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} parameters; "
        f"with all beside it {size:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
