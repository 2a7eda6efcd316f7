"""A directory's weights onto a card: streamed once, each to its place; `device` may be the CPU.

Matrices in tiles, the embedding and the vision tower lie in one piece of memory as they were read. Small tensors become
float32; matrices in other forms become fp16 tiles as soon as the last of their parts is there. A release may have quantised the
vision tower's matrices, too: they are kept like any other, and decoded when a picture comes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....checkpoint.container import TensorEntry
from ....checkpoint.directory import Checkpoint
from ....checkpoint.encodings import PLAIN_OF_DTYPE
from ....checkpoint.encodings.weights import weights_of
from ....checkpoint.errors import InputError
from ....checkpoint.manifest import DRAFT_HEAD, Manifest, has_manifest, read_manifest
from ....kernels.delta import DeltaWeights
from ....kernels.weights import Weight, dense
from ....model.config import FULL, VisionConfig
from ....model.inventory import DRAFT_IDS, EMBED, HEAD, LAYER, NORM, inventory
from ..sources import WeightSource, open_source
from ..vision import Affine, VisionBlock, VisionWeights
from ..weights import sizes_of
from .fitness import takes_quantised
from .matrices import Stored, aligned, half_of, matrix_of
from .stream import BLOCK_BYTES, StreamReport, stream
from .weights import CudaAttention, CudaDelta, CudaDraftHead, CudaLayer, CudaMtp, CudaWeights, tensors_of

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "U8": torch.uint8,
    "F8_E4M3": torch.uint8,
}  # fmt: skip


VISION = "vision"  # the group of the tower's weights


@dataclass(frozen=True)
class _Part:
    """One stored tensor: the weight it belongs to and as what; where it lies in the arena, None: it is only passing."""

    weight: str
    part: str
    entry: TensorEntry
    offset: int | None


@dataclass(frozen=True)
class LoadPlan:
    """What a directory's weights become on a device.

    stored      logical matrix -> its form
    arena       bytes of what stays as it is read
    nbytes      bytes of everything on the device
    vision      bytes of the vision tower among them
    passing     most bytes that are there beside it while it is made
    """

    source: WeightSource
    checkpoint: Checkpoint
    manifest: Manifest | None
    parts: dict[str, _Part]
    stored: dict[str, Stored]
    arena: int
    nbytes: int
    vision: int
    passing: int


def plan_load(directory: Path) -> LoadPlan:
    """From headers and manifest alone. Raises InputError where the directory is no whole, finished model."""
    source = open_source(directory)
    checkpoint = Checkpoint.open(directory)
    manifest = read_manifest(directory) if has_manifest(directory) else None
    named = _named(checkpoint, manifest)
    specs = inventory(source.config)
    parts: dict[str, _Part] = {}
    stored: dict[str, Stored] = {}
    offset = extra = passing = 0
    for weight, names in named.items():
        first = names.get("words") or names["plain"]
        encoding = PLAIN_OF_DTYPE.get(checkpoint.tensors[first].dtype, "")
        form = Stored(encoding, False) if manifest is None else Stored.of(manifest.tensors[first])
        quantised = specs[weight].group == VISION and len(source.shapes[weight]) == 2 and "plain" not in names
        matrix = is_matrix(source, weight) or quantised
        if "plain" not in names and not takes_quantised(weight, len(source.shapes[weight])):
            raise InputError(
                f"{directory}: {weight!r} is stored as {form.encoding}; the CUDA engine takes it as bf16, fp16 or fp32 "
                "only. Convert with a recipe that keeps it."
            )
        shape, here = source.shapes[weight], 0
        for part, name in names.items():
            entry = checkpoint.tensors[name]
            stays = form.keeps(part) if matrix else _stays(weight, specs[weight].group)
            parts[name] = _Part(weight, part, entry, offset if stays else None)
            offset += aligned(entry.nbytes) if stays else 0
            here += 0 if stays else entry.nbytes
        passing = max(passing, here)
        if matrix:
            stored[weight] = form
            extra += form.device_bytes(shape[0], shape[1]) - sum(
                checkpoint.tensors[name].nbytes for part, name in names.items() if form.keeps(part)
            )
        elif not _stays(weight, specs[weight].group):
            extra += aligned(4 * _elements(shape), 512)
    if source.config.tie_word_embeddings:
        rows, columns = _head_rows(source)[1], source.config.text.hidden_size
        extra += Stored("bf16", False).device_bytes(rows, columns)
    vision = sum(
        stored[weight].device_bytes(*source.shapes[weight])
        if weight in stored
        else sum(aligned(checkpoint.tensors[name].nbytes) for name in names.values())
        for weight, names in named.items()
        if specs[weight].group == VISION
    )
    return LoadPlan(source, checkpoint, manifest, parts, stored, offset, offset + extra, vision, passing)


def load_cuda_weights(
    directory: Path, device: torch.device, block_bytes: int = BLOCK_BYTES
) -> tuple[CudaWeights, StreamReport]:
    """One rank's weights from a rank or converted directory, or from a plain checkpoint; and what reading them cost.

    Raises InputError for a directory that is no whole, finished model or that the kernels cannot multiply with,
    CheckFailed naming the tensor whose bytes are not those of the manifest.
    """
    return load_planned(plan_load(directory), device, block_bytes)


def load_planned(
    plan: LoadPlan, device: torch.device, block_bytes: int = BLOCK_BYTES
) -> tuple[CudaWeights, StreamReport]:
    """As `load_cuda_weights`, of a directory that was looked at."""
    arrivals = _Arrivals(plan, device)
    report = stream(plan.checkpoint, plan.manifest, device, arrivals.place, arrivals.complete, block_bytes)
    weights = assemble(plan.source, arrivals.ready)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what was only passing
    return weights, report


def assemble(source: WeightSource, ready: dict[str, Tensor | Weight]) -> CudaWeights:
    """The model from every weight by its logical name, each used once; `ready` is emptied. Matrices are `Weight`s.

    Raises InputError for a weight that is missing, left over, or of another shape than the rank's.
    """
    return _Taker(source, ready).weights()


class _Arrivals:
    """Tensors as they come from the disk; `ready` holds each weight, whole, under its logical name."""

    def __init__(self, plan: LoadPlan, device: torch.device) -> None:
        self.ready: dict[str, Tensor | Weight] = {}
        self._plan = plan
        self._device = device
        self._arena = torch.empty(plan.arena, dtype=torch.uint8, device=device)
        self._raw: dict[str, Tensor] = {}
        self._here: dict[str, dict[str, Tensor]] = {}
        self._wanted: dict[str, int] = {}
        for part in plan.parts.values():
            self._wanted[part.weight] = self._wanted.get(part.weight, 0) + 1

    def place(self, name: str) -> Tensor:
        """Where the bytes of a stored tensor go."""
        part = self._plan.parts[name]
        if part.offset is None:
            self._raw[name] = torch.empty(part.entry.nbytes, dtype=torch.uint8, device=self._device)
        else:
            self._raw[name] = self._arena[part.offset : part.offset + part.entry.nbytes]
        return self._raw[name]

    def complete(self, name: str) -> None:
        """The last byte is on its way; a weight whose parts are all here is made."""
        part = self._plan.parts[name]
        tensor = self._raw.pop(name).view(_DTYPES[part.entry.dtype]).view(part.entry.shape)
        here = self._here.setdefault(part.weight, {})
        here[part.part] = tensor
        if len(here) < self._wanted[part.weight]:
            return
        del self._here[part.weight]
        if part.weight in self._plan.stored:
            self.ready[part.weight] = matrix_of(part.weight, self._plan.stored[part.weight], here)
        elif part.offset is None and part.weight != DRAFT_IDS:
            self.ready[part.weight] = tensor.float()
        else:
            self.ready[part.weight] = tensor


class _Taker:
    """Hands out every weight exactly once, put together as the model is."""

    def __init__(self, source: WeightSource, ready: dict[str, Tensor | Weight]) -> None:
        self._source = source
        self._where = source.where
        self._ready = ready

    def weights(self) -> CudaWeights:
        source, config = self._source, self._source.config
        embed = self._tensor(EMBED)
        counts = dict.fromkeys(config.text.layer_types, 0)
        layers = []
        for number, kind in enumerate(config.text.layer_types):
            layers.append(self._layer(f"{LAYER}.{number}", kind, counts[kind]))
            counts[kind] += 1
        norm = self._tensor(NORM)
        several = source.tp_size > 1
        if config.tie_word_embeddings:
            first, rows, head_cut = _head_rows(source)
            head: Weight = half_of(embed[first : first + rows])
        else:
            head, head_cut = self._matrix(HEAD), HEAD in source.cut and several
        mtp = self._mtp() if config.mtp_layers else None
        draft = None
        if config.text.draft_rows:
            ids = self._tensor(DRAFT_IDS)
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < config.text.vocab_size):
                raise InputError(
                    f"{self._where}: {DRAFT_IDS} names tokens beyond the vocabulary. Run `duovolt verify`."
                )
            draft = CudaDraftHead(self._matrix(DRAFT_HEAD), ids, DRAFT_HEAD in source.cut and several)
        vision = None if config.vision is None else self._vision(config.vision)
        if self._ready:
            raise InputError(
                f"{self._where}: no use for {len(self._ready)} weights: {', '.join(sorted(self._ready)[:4])}."
            )
        parts = (embed, layers, norm, head, mtp, draft, vision)
        return CudaWeights(
            config, source.tp_size, source.tp_rank, sizes_of(source), embed, layers, norm, head, head_cut, mtp, draft,
            vision, _storage_bytes(parts),
        )  # fmt: skip

    def _take(self, name: str) -> Tensor | Weight:
        if name not in self._ready:
            raise InputError(f"{self._where}: weight {name!r} is asked for twice or is not there.")
        return self._ready.pop(name)

    def _tensor(self, name: str) -> Tensor:
        found = self._take(name)
        assert isinstance(found, Tensor), f"{name} is a matrix"
        if tuple(found.shape) != self._source.shapes[name]:
            raise self._wrong_shape(name, tuple(found.shape))
        return found

    def _matrix(self, name: str) -> Weight:
        found = self._take(name)
        assert not isinstance(found, Tensor), f"{name} is no matrix"
        if found.shape != self._source.shapes[name]:
            raise self._wrong_shape(name, found.shape)
        return found

    def _wrong_shape(self, name: str, shape: tuple[int, ...]) -> InputError:
        source = self._source
        return InputError(
            f"{self._where}: weight {name!r} is {list(shape)}, rank {source.tp_rank} of {source.tp_size} should hold "
            f"{list(source.shapes[name])}. Run `duovolt shard` again."
        )

    def _layer(self, prefix: str, kind: str, index: int) -> CudaLayer:
        return CudaLayer(
            index=index,
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight"),
            mixer=self._attention(f"{prefix}.self_attn") if kind == FULL else self._delta(f"{prefix}.linear_attn"),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate=self._matrix(f"{prefix}.mlp.gate_proj.weight"),
            up=self._matrix(f"{prefix}.mlp.up_proj.weight"),
            down=self._matrix(f"{prefix}.mlp.down_proj.weight"),
        )

    def _attention(self, prefix: str) -> CudaAttention:
        query, key, value = (self._matrix(f"{prefix}.{name}_proj.weight") for name in "qkv")
        return CudaAttention(
            inputs=(query, key, value),
            query_norm=self._tensor(f"{prefix}.q_norm.weight"),
            key_norm=self._tensor(f"{prefix}.k_norm.weight"),
            output=self._matrix(f"{prefix}.o_proj.weight"),
        )

    def _delta(self, prefix: str) -> CudaDelta:
        qkv, z, b, a = (self._matrix(f"{prefix}.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a"))
        return CudaDelta(
            inputs=(qkv, z, b, a),
            delta=DeltaWeights(
                self._tensor(f"{prefix}.conv1d.weight")[:, 0],
                self._tensor(f"{prefix}.A_log"),
                self._tensor(f"{prefix}.dt_bias"),
            ),
            norm=self._tensor(f"{prefix}.norm.weight"),
            output=self._matrix(f"{prefix}.out_proj.weight"),
        )

    def _mtp(self) -> CudaMtp:
        return CudaMtp(
            fc=self._matrix("mtp.fc.weight"),
            embedding_norm=self._tensor("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self._tensor("mtp.pre_fc_norm_hidden.weight"),
            layer=self._layer("mtp.layers.0", FULL, 0),
            norm=self._tensor("mtp.norm.weight"),
        )

    def _affine(self, name: str) -> Affine:
        """Of the vision tower; what a release has quantised stays so."""
        weight = f"{name}.weight"
        whole = isinstance(self._ready.get(weight), Tensor)
        return Affine(self._tensor(weight) if whole else self._matrix(weight), self._tensor(f"{name}.bias"))

    def _table(self, name: str) -> Tensor:
        """A table of the vision tower: looked up, not multiplied with, so decoded at once."""
        return self._tensor(name) if isinstance(self._ready.get(name), Tensor) else dense(self._matrix(name))

    def _vision(self, config: VisionConfig) -> VisionWeights:
        prefix = "model.visual"
        patch = self._affine(f"{prefix}.patch_embed.proj")
        names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
        blocks = [
            VisionBlock(*(self._affine(f"{prefix}.blocks.{index}.{name}") for name in names))
            for index in range(config.depth)
        ]
        return VisionWeights(
            config.num_heads,
            Affine(patch.plain.flatten(1), patch.bias),
            self._table(f"{prefix}.pos_embed.weight"),
            blocks,
            *(self._affine(f"{prefix}.merger.{name}") for name in ("norm", "linear_fc1", "linear_fc2")),
        )


def _named(checkpoint: Checkpoint, manifest: Manifest | None) -> dict[str, dict[str, str]]:
    """logical weight -> part -> stored tensor."""
    if manifest is None:
        return {name: {"plain": name} for name in checkpoint.tensors}
    for name, record in manifest.tensors.items():
        entry = checkpoint.tensors.get(name)
        if entry is None or entry.dtype != record.dtype or list(entry.shape) != record.shape:
            stored = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise InputError(
                f"{checkpoint.path}: tensor {name!r} is {stored}; the manifest says {record.dtype} {record.shape}. "
                "Make this directory again."
            )
    return weights_of(manifest)


def is_matrix(source: WeightSource, weight: str) -> bool:
    """True for what tokens are multiplied with by the linear kernels."""
    return len(source.shapes[weight]) == 2 and weight != EMBED and not weight.startswith("model.visual.")


def _stays(weight: str, group: str) -> bool:
    """True for tensors other than matrices that are used as they are stored."""
    return weight in (EMBED, DRAFT_IDS) or group == VISION


def _head_rows(source: WeightSource) -> tuple[int, int, bool]:
    """Of a head tied to the embedding: this rank's first row, its rows, and whether they are a share."""
    rows, size = source.config.text.vocab_size, source.tp_size
    if size == 1 or rows % size:
        return 0, rows, False
    return source.tp_rank * (rows // size), rows // size, True


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _storage_bytes(parts: object) -> int:
    """Bytes of the distinct pieces of memory under these tensors."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(parts)}
    return sum(found.values())
