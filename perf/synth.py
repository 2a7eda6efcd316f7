"""`synth`: a checkpoint of any size in the form of a public release, sparse (headers alone) or filled with random words.

A sparse one takes no room on disk: it is for everything that reads headers only. A filled one is for measuring, and can
be converted, split, verified and served. Its bytes depend on the configuration, the release and the seed alone.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..checkpoint.digest import digest_json, json_bytes
from ..checkpoint.directory import INDEX
from ..checkpoint.errors import InputError
from ..checkpoint.manifest import FileRecord
from ..checkpoint.sources import HF_QUANT_CONFIG, QUANTIZATION_CONFIG
from ..checkpoint.stage import StageDirectory, disk_errors, require_space
from ..checkpoint.writer import ShardWriter, encode_header
from ..convert.pipeline import convert
from ..convert.recipe import Recipe
from ..model.config import ModelConfig
from ..model.inventory import inventory
from ..model.partition import split_of
from ..shard.split import shard
from . import tables
from .releases import RELEASES, Release, Stored

Advance = Callable[[int], None]
METADATA = {"format": "pt"}
# Files of the bundled model that make a synthetic one answer requests, where its vocabulary is large enough.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")
MEDIA_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Specimen:
    """What is to be made: config.json as a JSON value, a name of RELEASES, `sparse` or a seed."""

    config: dict[str, Any]
    release: str
    seed: int
    sparse: bool

    @property
    def form(self) -> Release:
        return RELEASES[self.release]

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_dict(self.config)

    def files(self) -> list[tuple[str, list[Stored]]]:
        """(file name, its tensors). Raises InputError for an extent that the release's words do not fill."""
        for spec_rows, spec_columns, name in _packed(self):
            if spec_columns % 16:
                raise InputError(
                    f"{name} [{spec_rows}, {spec_columns}]: {spec_columns} columns are no multiple of 16, the groups of "
                    f"nvfp4. Choose another --release than {self.release}."
                )
        return self.form.files(self.model)

    @property
    def identity(self) -> str:
        """Digest of what decides the bytes."""
        return digest_json([self.config, self.release, None if self.sparse else self.seed])

    @property
    def nbytes(self) -> int:
        return sum(item.tensor.nbytes for _, items in self.files() for item in items)


def _packed(specimen: Specimen) -> list[tuple[int, int, str]]:
    """Logical rows, columns and name of every weight that the release has in nvfp4."""
    layers = specimen.model.text.num_hidden_layers
    return [
        (spec.shape[0], spec.shape[1], spec.name)
        for spec in inventory(specimen.model).values()
        if any(item.kind == "nvfp4" for item in specimen.form.write(spec, layers))
    ]


def _write_sparse(stage: StageDirectory, name: str, items: Sequence[Stored]) -> None:
    tensors = [item.tensor for item in items]
    with stage.create(name) as handle:
        handle.write(encode_header(tensors, METADATA))
        handle.skip(sum(tensor.nbytes for tensor in tensors))


def _write_filled(
    stage: StageDirectory, name: str, items: Sequence[Stored], seed: int, advance: Advance
) -> FileRecord | None:
    """None if an earlier run wrote the file."""
    if stage.resume(name) is not None:
        advance(sum(item.tensor.nbytes for item in items))
        return None
    with stage.create(name) as handle:
        writer = ShardWriter(handle, [item.tensor for item in items], METADATA)
        for item in items:
            for number in range(tables.blocks(item.tensor)):
                block = tables.block(seed, item.tensor, item.kind, number)
                writer.write(block)
                advance(len(block))
        return writer.close()


@dataclass(frozen=True)
class _Serving:
    """What makes a specimen answer requests: side files, and the ids that the tokenizer among them has for media."""

    files: dict[str, bytes]
    ids: dict[str, int]


def _serving_files(specimen: Specimen) -> _Serving:
    """Of the bundled model, its processors with the extents of the specimen's own tower and the family's sizes; none for a
    vocabulary that is smaller than the tokenizer."""
    bundled = resources.files("duovolt.tiny") / "checkpoint"
    known = json.loads((bundled / "config.json").read_text())
    if specimen.model.text.vocab_size < known["text_config"]["vocab_size"]:
        return _Serving({}, {})
    files = {name: (bundled / name).read_bytes() for name in TOKENIZER}
    if (vision := specimen.model.vision) is not None:
        extents = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }
        for name in PROCESSORS:
            settings = json.loads((bundled / name).read_text())
            del settings["size"]  # the tiny model's own
            files[name] = json_bytes(settings | extents)
    return _Serving(files, {name: known[name] for name in MEDIA_IDS if name in specimen.config})


def _side_files(specimen: Specimen) -> dict[str, bytes]:
    served = _serving_files(specimen)
    quantisation = specimen.form.declare(specimen.model)
    config = specimen.config | served.ids | ({} if quantisation is None else {QUANTIZATION_CONFIG: quantisation})
    found = {"config.json": json_bytes(config)}
    if quantisation is not None and specimen.form.hf_quant:
        stated = {key: value for key, value in quantisation.items() if key in ("quant_algo", "quantized_layers")}
        producer = {"name": "modelopt", "version": "0.47.0"}
        both = {"producer": producer, "quantization": stated | {"kv_cache_quant_algo": None}}
        found[HF_QUANT_CONFIG] = json_bytes(both)
    return found | served.files


def write_source(target: Path, specimen: Specimen, workers: int, advance: Advance) -> int:
    """Write the specimen into a new directory, on `workers` threads, a file each; the bytes of its tensors.

    `advance` is called with bytes written. An interrupted run is resumed. Raises InputError if the directory holds
    something else, EnvironmentFault if the disk is too small.
    """
    files, total = specimen.files(), specimen.nbytes
    if not target.exists():
        require_space(target, 0 if specimen.sparse else total)
    with StageDirectory(target, f"synthetic checkpoint {specimen.identity}") as stage, disk_errors(target):
        if specimen.sparse:
            for name, items in files:
                _write_sparse(stage, name, items)
        else:
            _fill(stage, files, specimen.seed, workers, advance)
        for name, content in _side_files(specimen).items():
            stage.put(name, content)
        weight_map = {item.tensor.name: name for name, items in files for item in items}
        metadata = {"total_size": total} if specimen.form.total_size else {}
        stage.put(INDEX, json_bytes({"metadata": metadata, "weight_map": weight_map}))
        stage.finish()
    return total


def _fill(
    stage: StageDirectory, files: list[tuple[str, list[Stored]]], seed: int, workers: int, advance: Advance
) -> None:
    kinds = {(item.kind, item.tensor.dtype) for _, items in files for item in items}
    for kind, dtype in sorted(kinds):
        tables.table(kind, dtype)  # once, before threads would each make it
    order = sorted(files, key=lambda file: -sum(item.tensor.nbytes for item in file[1]))  # the largest take longest
    with ThreadPoolExecutor(workers) as pool:
        records = pool.map(lambda file: _write_filled(stage, file[0], file[1], seed, advance), order)
        for (name, _), record in zip(order, records, strict=True):
            if record is not None:
                stage.finished(name, record)


def write_stages(
    target: Path, specimen: Specimen, recipe: Recipe, tp: int | None, workers: int, advance: Advance
) -> None:
    """The specimen converted, and split over `tp` ranks if that is given, into `target`; nothing else is left behind.

    Earlier stages lie in a hidden directory beside `target` while they are needed.
    """
    recipe.encodings(specimen.model)  # refuses what cannot be converted or split, before anything is written
    for spec in inventory(specimen.model).values():
        split_of(spec, specimen.model, tp or 1)
    aside = target.with_name(f".{target.name}.synth-{specimen.identity[:12]}")
    if target.exists() and any(target.iterdir()) and not aside.exists():
        raise InputError(f"{target}: not empty. Choose a new directory.")
    source, converted = aside / "source", target if tp is None else aside / "converted"
    aside.mkdir(parents=True, exist_ok=True)
    if not (source / "config.json").exists() or not (source / INDEX).exists():
        write_source(source, specimen, workers, advance)
    convert(source, converted, recipe, workers, advance)
    if tp is not None:
        shutil.rmtree(source)
        shard(converted, target, tp, None, advance)
    shutil.rmtree(aside)
