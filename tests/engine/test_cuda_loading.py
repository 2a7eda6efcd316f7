"""A rank's weights as the CUDA engine holds them, here on the CPU: each value once, exact, from proved bytes."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from duovolt.checkpoint.digest import file_blocks
from duovolt.checkpoint.directory import INDEX, Checkpoint, read_json
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.errors import CheckFailed, InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.kernels.weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import EMBED, TensorSpec, inventory
from duovolt.runtime.engine import digests
from duovolt.runtime.engine.cuda import stream as stream_module
from duovolt.runtime.engine.cuda.loading import load_cuda_weights, plan_load
from duovolt.runtime.engine.cuda.stream import READERS
from duovolt.runtime.engine.cuda.weights import CudaAttention, CudaDelta, CudaWeights, tensors_of
from duovolt.runtime.engine.sources import open_source
from duovolt.runtime.engine.weights import ModelWeights, load_weights
from duovolt.shard.split import shard

from ..support.damage import edit_manifest, edit_tensor, refit
from ..support.maker import config, converted, random_words

CPU = torch.device("cpu")
TEXT = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KINDS = ("nvfp4", "nvfp4/divisor", "fp8_e4m3", "fp8_e4m3/tensor", "fp8_e4m3/128x128", "fp8_e4m3/32x64", "bf16", "fp16")


def mixed(spec: TensorSpec) -> str:
    """Every encoding somewhere; what is no matrix of the kernels stays bf16."""
    if len(spec.shape) != 2 or spec.group == "vision" or spec.name == EMBED or spec.shape[0] % 32:
        return "bf16"
    return KINDS[list(inventory_names).index(spec.name) % len(KINDS)]


inventory_names: dict[str, None] = {}


def words(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """As `random_words`, and fp16."""
    if dtype != "F16":
        return random_words(weight, part, shape, dtype)
    return np.random.default_rng(len(weight)).standard_normal(shape).astype(np.float16)


def make(path: Path, layout: str = "v100", **text: int) -> Path:
    """A converted directory of every encoding; its split over two beside it."""
    made = config(**(TEXT | text))
    inventory_names.clear()
    inventory_names.update(dict.fromkeys(inventory(ModelConfig.from_dict(made))))
    converted(path / "converted", made, words=words, encoding=mixed, layout=layout, max_shard_bytes=200_000)
    return path


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("stages"))
    for size in (1, 2):
        shard(folder / "converted", folder / "ranks", size)
    return folder


def value(weight: object) -> np.ndarray:
    if isinstance(weight, torch.Tensor):
        return weight.float().numpy()
    return (weight.values() * weight.scale.reshape(-1, 1)).numpy()


def pairs(ours: CudaWeights, theirs: ModelWeights) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Name, our values, the reference engine's."""
    found = [("embed", value(ours.embed), theirs.embed), ("norm", value(ours.norm), theirs.norm)]
    found.append(("head", value(ours.head), theirs.head))
    layers = list(zip(ours.layers, theirs.layers, strict=True))
    if ours.mtp is not None:
        layers.append((ours.mtp.layer, theirs.mtp.layer))
        found += [(f"mtp.{n}", value(getattr(ours.mtp, n)), getattr(theirs.mtp, n)) for n in ("fc", "norm")]
        found += [(n, value(getattr(ours.mtp, n)), getattr(theirs.mtp, n)) for n in ("embedding_norm", "hidden_norm")]
    for number, (mine, other) in enumerate(layers):
        assert mine.index == other.index
        found.append((f"{number}.gate_up", np.concatenate([value(mine.gate), value(mine.up)]), other.gate_up))
        found.append((f"{number}.down", value(mine.down), other.down.weight))
        found += [(f"{number}.{n}", value(getattr(mine, n)), getattr(other, n)) for n in ("input_norm", "post_norm")]
        inputs = np.concatenate([value(weight) for weight in mine.mixer.inputs])
        found.append((f"{number}.inputs", inputs, other.mixer.inputs))
        found.append((f"{number}.output", value(mine.mixer.output), other.mixer.output.weight))
        if isinstance(mine.mixer, CudaAttention):
            small, names = mine.mixer, ("query_norm", "key_norm")
        else:
            assert isinstance(mine.mixer, CudaDelta)
            small, names = mine.mixer.delta, ("conv", "a_log", "dt_bias")
            found.append((f"{number}.norm", value(mine.mixer.norm), other.mixer.norm))
        found += [(f"{number}.{n}", value(getattr(small, n)), getattr(other.mixer, n)) for n in names]
    for mine, other in zip(tensors_of(ours.vision), tensors_of(theirs.vision), strict=True):
        found.append(("vision", value(mine), other))
    return [(name, left, right.numpy()) for name, left, right in found]


@pytest.mark.parametrize("place", ["converted", "ranks/rank-0-of-1", "ranks/rank-0-of-2", "ranks/rank-1-of-2"])
def test_every_value_is_the_decoded_one(stages: Path, place: str) -> None:
    """Bit for bit, but for what is scaled twice in float32 (a divisor, block scales): one rounding."""
    ours, report = load_cuda_weights(stages / place, CPU, block_bytes=4099)  # blocks end anywhere in a tensor
    assert report.nbytes == sum(file.stat().st_size for file in (stages / place).glob("*.safetensors"))
    theirs = load_weights(open_source(stages / place))
    assert (ours.tp_size, ours.tp_rank, ours.head_cut) == (theirs.tp_size, theirs.tp_rank, theirs.head_cut)
    assert ours.sizes == theirs.sizes
    for name, mine, other in pairs(ours, theirs):
        assert mine.shape == other.shape, name
        np.testing.assert_allclose(mine, other, rtol=3e-7, atol=0, err_msg=name)


def test_tiles_lie_as_they_were_read_and_the_rest_becomes_fp16(stages: Path) -> None:
    """Canonical parts that fill no tiles are exact in fp16; every encoding of the kernels is met."""
    weights, _ = load_cuda_weights(stages / "ranks" / "rank-0-of-2", CPU)
    kinds = {type(weight) for weight in matrices(weights)}
    assert kinds == {Nvfp4Weight, Fp8Weight, Fp8BlockWeight, HalfWeight}
    assert weights.embed.dtype == torch.bfloat16 and weights.vision.positions.dtype == torch.bfloat16
    arena = weights.embed.untyped_storage().data_ptr()
    tiled = [weight for weight in matrices(weights) if not isinstance(weight, HalfWeight)]
    assert tiled and all(weight.words.untyped_storage().data_ptr() == arena for weight in tiled)
    assert all(tensor.data_ptr() % 16 == 0 for weight in matrices(weights) for tensor in tensors_of(weight))


def matrices(part: object) -> list[object]:
    if isinstance(part, Nvfp4Weight | Fp8Weight | Fp8BlockWeight | HalfWeight):
        return [part]
    if isinstance(part, list | tuple):
        return [found for item in part for found in matrices(item)]
    if hasattr(part, "__dataclass_fields__"):
        return [found for field in fields(part) for found in matrices(getattr(part, field.name))]
    return []


def test_a_canonical_directory_loads_exactly(tmp_path: Path) -> None:
    folder = make(tmp_path, "canonical") / "converted"
    weights, _ = load_cuda_weights(folder, CPU)
    assert {type(weight) for weight in matrices(weights)} == {HalfWeight}
    checkpoint, manifest = Checkpoint.open(folder), read_manifest(folder)
    exact = 0
    for name, mine in matrices_by_name(weights).items():
        encoding = manifest.tensors[name].encoding
        wanted = read_weight(checkpoint, manifest, name)
        if encoding.startswith("nvfp4"):  # the reference rounds the product of the scales, before the codes
            np.testing.assert_allclose(value(mine), wanted, rtol=3e-7, atol=0, err_msg=name)
            exact += 1
        elif encoding in ("fp8_e4m3", "fp8_e4m3/tensor", "bf16", "fp16"):
            assert np.array_equal(value(mine), wanted), (name, encoding)
            exact += 1
        else:  # float32 scales inside a row: rounded to eleven bits
            np.testing.assert_allclose(value(mine), wanted, rtol=2**-10, atol=1e-9, err_msg=name)
    assert exact > 20


def matrices_by_name(weights: CudaWeights) -> dict[str, object]:
    found: dict[str, object] = {"lm_head.weight": weights.head, "mtp.fc.weight": weights.mtp.fc}
    for number, layer in enumerate(weights.layers):
        prefix = f"model.language_model.layers.{number}"
        found |= {f"{prefix}.mlp.{name}_proj.weight": getattr(layer, name) for name in ("gate", "up", "down")}
        if isinstance(layer.mixer, CudaAttention):
            names = [f"self_attn.{name}_proj" for name in "qkvo"]
        else:
            names = [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")] + ["linear_attn.out_proj"]
        for name, weight in zip(names, (*layer.mixer.inputs, layer.mixer.output), strict=True):
            found[f"{prefix}.{name}.weight"] = weight
    return found


@pytest.mark.parametrize("place", ["converted", "ranks/rank-1-of-2"])
def test_the_plan_knows_the_bytes(stages: Path, place: str) -> None:
    """L05: within allocation granularity of what the tensors take."""
    plan = plan_load(stages / place)
    weights, _ = load_cuda_weights(stages / place, CPU)
    assert abs(plan.nbytes - weights.nbytes) < 0.05 * weights.nbytes


def on_reference(directory: Path) -> None:
    load_weights(open_source(directory))


def on_card(directory: Path) -> None:
    load_cuda_weights(directory, CPU, block_bytes=5000)


LOADERS = pytest.mark.parametrize("load", [on_reference, on_card])


@LOADERS
@pytest.mark.parametrize("name", ["lm_head.weight", "model.language_model.layers.0.input_layernorm.weight"])
def test_a_flipped_byte_is_named_by_tensor(
    stages: Path, tmp_path: Path, name: str, load: Callable[[Path], None]
) -> None:
    """L07."""
    broken = tmp_path / "rank-1-of-2"
    shutil.copytree(stages / "ranks" / "rank-1-of-2", broken)
    edit_tensor(broken, name, lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 1))
    with pytest.raises(CheckFailed, match=f"tensor '{name}' has the digest .* damaged"):
        load(broken)


@LOADERS
def test_a_damaged_header_is_named_by_file(stages: Path, tmp_path: Path, load: Callable[[Path], None]) -> None:
    """L07: bytes that belong to no tensor."""
    broken = tmp_path / "rank-1-of-2"
    shutil.copytree(stages / "ranks" / "rank-1-of-2", broken)
    path = next(iter(sorted(broken.glob("*.safetensors"))))
    raw = path.read_bytes()
    swapped = raw.replace(b'tp_rank":"1"', b'tp_rank":"0"', 1)
    assert swapped != raw
    path.write_bytes(swapped)
    with pytest.raises(CheckFailed, match=rf"{path.name}: the file has the digest"):
        load(broken)


@LOADERS
def test_a_file_of_another_size_is_refused(stages: Path, tmp_path: Path, load: Callable[[Path], None]) -> None:
    broken = tmp_path / "rank-0-of-2"
    shutil.copytree(stages / "ranks" / "rank-0-of-2", broken)
    name = next(name for name in read_manifest(broken).files if name.endswith(".safetensors"))
    edit_manifest(broken, lambda value: value["files"][name].__setitem__("size", 12))
    with pytest.raises(InputError, match="the manifest says 12"):
        load(broken)


@pytest.mark.parametrize("block", [997, 65536, 8 << 20])
def test_the_reference_reads_digests_over_any_cut_of_a_file(
    stages: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    directory = stages / "ranks" / "rank-1-of-2"
    monkeypatch.setattr(digests, "file_blocks", partial(file_blocks, block_bytes=block))
    digests.check_digests(Checkpoint.open(directory), read_manifest(directory))


def test_a_missing_tensor_is_refused(stages: Path, tmp_path: Path) -> None:
    """L06: every parameter is written exactly once; here index and manifest agree that there is one less."""
    broken, name = tmp_path / "rank-0-of-2", "model.language_model.layers.1.mlp.down_proj.weight"
    shutil.copytree(stages / "ranks" / "rank-0-of-2", broken)
    manifest = read_manifest(broken)
    gone = [stored for stored, record in manifest.tensors.items() if record.weight == name]
    metadata = dict(next(iter(Checkpoint.open(broken).headers.values())).metadata)
    index = read_json(broken / INDEX)
    for stored in gone:
        path = broken / manifest.tensors[stored].file
        tensors = {other: tensor for other, tensor in load_file(path).items() if other != stored}
        save_file(tensors, path, metadata)
        del index["weight_map"][stored]
    (broken / INDEX).write_text(json.dumps(index))
    edit_manifest(broken, lambda value: [value["tensors"].pop(stored) for stored in gone])
    refit(broken)
    with pytest.raises(InputError, match=f"1 missing: {name}"):
        load_cuda_weights(broken, CPU)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("axis", 3), ("axis", -1), ("ranges", [[5, 2]]), ("ranges", [[32, 64]]), ("ranges", [[0, 2**60]]),
        ("whole", {"shape": [1, 2], "layout": "v100-fp8", "digest": "0" * 32}),
        ("whole", {"shape": [], "layout": "canonical", "digest": "0" * 32}),
        ("whole", {"shape": [1], "layout": "nobody's", "digest": "0" * 32}),
    ],
)  # fmt: skip
def test_a_rank_whose_records_of_the_cut_make_no_sense_is_refused(
    stages: Path, tmp_path: Path, key: str, value: Any
) -> None:
    rank = shutil.copytree(stages / "ranks" / "rank-1-of-2", tmp_path / "rank")
    tiled = [name for name, record in read_manifest(rank).tensors.items() if record.encoding == "fp8_e4m3/128x128"]
    words = [name for name in tiled if name.endswith(".weight")]
    edit_manifest(rank, lambda m: [m["tensors"][name]["split"].__setitem__(key, value) for name in words])
    with pytest.raises(InputError):
        load_weights(open_source(rank))
    with pytest.raises(InputError):
        load_cuda_weights(rank, CPU)


@pytest.mark.parametrize("encoding", [*KINDS, "fp8_e4m3/16x16"])
def test_every_encoding_of_a_matrix_is_served_and_a_quantised_embedding_is_told(tmp_path: Path, encoding: str) -> None:
    """L02: the verdict is given from headers, and says what to convert with."""

    def chosen(spec: TensorSpec, embed: str) -> str:
        if spec.name == EMBED:
            return embed
        return encoding if spec.role == "mlp.up_proj" else "bf16"

    made = config(**TEXT)
    converted(tmp_path / "good", made, words=words, encoding=lambda spec: chosen(spec, "bf16"))
    assert plan_load(tmp_path / "good").nbytes > 0
    if encoding.startswith(("bf16", "fp16")):
        return
    converted(tmp_path / "bad", made, words=words, encoding=lambda spec: chosen(spec, encoding))
    with pytest.raises(InputError, match=r"embed_tokens.* is stored as .*Convert with a recipe that keeps it"):
        plan_load(tmp_path / "bad")


def test_a_file_is_closed_after_the_last_reader_even_where_another_failed(
    stages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of a closed file may be that of another by then."""
    ends: list[str] = []

    def read(file: int, path: Path, begin: int, buffer: torch.Tensor) -> None:
        if begin == 0:
            raise InputError("the disk says no")
        time.sleep(0.05)
        os.fstat(file)
        ends.append("read")

    monkeypatch.setattr(stream_module, "_read_part", read)
    with pytest.raises(InputError, match="the disk says no"):
        load_cuda_weights(stages / "converted", torch.device("cpu"))
    assert ends == ["read"] * (READERS - 1)
