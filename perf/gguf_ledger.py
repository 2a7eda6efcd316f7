"""Bytes of a token of a GGUF model, so that other engines' files can be judged: one launch a matrix, as they store it.

Which matrix is read how follows from the names that llama.cpp gives (`token_embd`, `output`, `blk.N.*_exps`, `ssm_*`); KV
and recurrent state follow from the metadata. Layers of draft heads (`nextn`) are not read by a token and are left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.errors import InputError
from .gguf_header import GgufHeader, GgufTensor, read_header
from .ledger import Launch, Ledger, Shape, kv_bytes

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_VECTORS = ("ssm_a", "ssm_conv1d", "ssm_dt", "ssm_norm")


@dataclass(frozen=True)
class GgufModel:
    """A header with the numbers that decide what a token reads. `drafting`: layers at the end that only drafts use."""

    header: GgufHeader
    arch: str
    blocks: int
    drafting: int

    @staticmethod
    def open(path: Path) -> "GgufModel":
        """Raises InputError for a file that is no language model's."""
        header = read_header(path)
        arch = header.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise InputError(f"{path}: no general.architecture: not a model's GGUF file.")
        if header.metadata.get("split.count", 1) not in (0, 1):
            raise InputError(f"{path}: a part of a split file. Join the parts (llama-gguf-split --merge).")
        blocks, drafting = header.whole(f"{arch}.block_count"), header.whole(f"{arch}.nextn_predict_layers", 0)
        if not 0 < blocks <= 1 << 16 or drafting >= blocks:
            raise InputError(f"{path}: {blocks} layers, {drafting} of them for drafts, make no sense.")
        if "token_embd.weight" not in header.tensors:
            raise InputError(f"{path}: no token_embd.weight: not a language model's GGUF file.")
        return GgufModel(header, arch, blocks, drafting)

    def number(self, key: str, default: int | None = None) -> int:
        return self.header.whole(f"{self.arch}.{key}", default)

    @property
    def label(self) -> str:
        kinds: dict[str, int] = {}
        for tensor in self.header.tensors.values():
            kinds[tensor.type] = kinds.get(tensor.type, 0) + tensor.nbytes
        return f"{self.header.path.name} ({self.arch}, mostly {max(kinds, key=lambda kind: kinds[kind])})"

    def kv_heads(self, block: int) -> int:
        """KV heads of a layer; files give one number for all, or a list."""
        found = self.header.metadata.get(f"{self.arch}.attention.head_count_kv")
        if isinstance(found, list):
            found = found[block] if block < len(found) else None
        if type(found) is not int or not 0 <= found <= 1 << 16:
            raise InputError(
                f"{self.header.path}: {self.arch}.attention.head_count_kv gives layer {block} {found!r:.40}."
            )
        return found

    def kv_position(self, block: int, kv: str) -> int:
        """Bytes of a position's keys and values in a layer."""
        heads, default = self.kv_heads(block), 0
        if (query := self.header.metadata.get(f"{self.arch}.attention.head_count")) and type(query) is int:
            default = self.number("embedding_length") // query
        sizes = (self.number(f"attention.{what}_length", default) for what in ("key", "value"))
        return sum(kv_bytes(heads, size, kv) // 2 for size in sizes)

    @property
    def state_bytes(self) -> int:
        """Recurrent state and convolution history of a layer, float32."""
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        channels = inner + 2 * self.number("ssm.group_count") * state
        return 4 * (inner * state + (self.number("ssm.conv_kernel") - 1) * channels)


def gguf_ledger(path: Path, shape: Shape) -> Ledger:
    """A token of one sequence. Raises InputError for drafts or several lanes, which depend on the engine."""
    if shape.drafts or shape.lanes != 1:
        raise InputError(f"{path}: GGUF files are counted a token at a time: --drafts 0 --lanes 1.")
    model = GgufModel.open(path)
    return Ledger(model.label, 1, shape, tuple(_launches(model, shape)))


def _launches(model: GgufModel, shape: Shape) -> Iterator[Launch]:
    tensors = model.header.tensors
    embedding = tensors["token_embd.weight"]
    yield Launch("embed", "small", "verify", "1 row", embedding.nbytes // embedding.shape[0])
    blocks: dict[int, list[tuple[str, GgufTensor]]] = {}
    for name, tensor in tensors.items():
        if found := _BLOCK.fullmatch(name):
            blocks.setdefault(int(found[1]), []).append((found[2], tensor))
    for block in range(model.blocks - model.drafting):
        yield from _block(model, shape, block, dict(blocks.get(block, [])))
    head = tensors.get("output.weight", embedding)
    for name in ("output_norm.weight",):
        if name in tensors:
            yield Launch("rms_norm", "small", "verify", name, tensors[name].nbytes)
    yield _matrix(head, "head")


def _block(model: GgufModel, shape: Shape, block: int, tensors: dict[str, GgufTensor]) -> Iterator[Launch]:
    if not tensors:
        raise InputError(f"{model.header.path}: layer {block} of {model.blocks} has no tensors.")
    where, vectors = f"blk.{block}", 0
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight").removesuffix(".bias")
        if module.endswith("_exps") and len(tensor.shape) == 3:
            yield _experts(model, tensor)
        elif len(tensor.shape) == 1 or module in _VECTORS:
            vectors += tensor.nbytes
        else:
            yield _matrix(tensor, "linear")
    yield Launch("norms", "small", "verify", where, vectors)
    if "ssm_out.weight" in tensors or "ssm_conv1d.weight" in tensors:
        state = model.state_bytes
        yield Launch("state", "delta", "verify", where, state=state, written=state)
    elif "attn_k.weight" in tensors or "attn_qkv.weight" in tensors:
        position = model.kv_position(block, shape.kv)
        yield Launch("attention", "attention", "verify", where, kv=(shape.context + 1) * position, written=position)


def _matrix(tensor: GgufTensor, family: str) -> Launch:
    kind = (tensor.type.lower(),)
    name = tensor.name.removesuffix(".weight")
    if family == "head":
        return Launch("linear", "head", "verify", name, tensor.nbytes, encodings=kind)
    return Launch("linear", "linear", "verify", name, tensor.nbytes, encodings=kind)


def _experts(model: GgufModel, tensor: GgufTensor) -> Launch:
    count, used = model.number("expert_count"), model.number("expert_used_count")
    if not 0 < used <= count or tensor.shape[0] != count:
        raise InputError(
            f"{model.header.path}: {tensor.name} has {tensor.shape[0]} experts, the metadata {used} of {count} a token."
        )
    name = tensor.name.removesuffix(".weight")
    return Launch("linear", "linear", "verify", name, tensor.nbytes * used / count, encodings=(tensor.type.lower(),))
