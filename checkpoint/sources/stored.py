"""What names, dtypes and shapes say of each module, whatever a configuration claims."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..container import TensorEntry
from ..encodings import PLAIN_OF_DTYPE, PartName, tiled
from ..errors import InputError
from .base import Scheme, SourceWeight

FLOATS = ("F32", "BF16", "F16")
# Tensors of one value that belong to activations or to the KV cache: no weight needs them.
ACTIVATION_SCALES = {
    "input_scale": "scale of the activations, which stay 16 bits wide",
    "input_global_scale": "scale of the activations, which stay 16 bits wide",
    "activation_scale": "scale of the activations, which stay 16 bits wide",
    "output_scale": "scale of the activations, which stay 16 bits wide",
    "k_scale": "scale of an FP8 KV cache, which is quantised anew while serving",
    "v_scale": "scale of an FP8 KV cache, which is quantised anew while serving",
    "q_scale": "scale of FP8 queries, which stay 16 bits wide",
    "prob_scale": "scale of FP8 attention weights, which stay 16 bits wide",
}
SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
WORDS = ("weight", "weight_packed")


@dataclass
class Module:
    """The tensors of one module by the last component of their names."""

    name: str
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def words(self) -> TensorEntry | None:
        return self.tensors.get("weight_packed") or self.tensors.get("weight")

    @property
    def quantised(self) -> bool:
        """True if a weight is stored in other than floating-point words, or has scales."""
        words = self.words
        return bool(self.tensors.keys() & set(SCALES)) or (words is not None and words.dtype not in PLAIN_OF_DTYPE)


def modules_of(tensors: Mapping[str, TensorEntry]) -> dict[str, Module]:
    """Modules by name, in the order of the tensors."""
    found: dict[str, Module] = {}
    for name, entry in tensors.items():
        module, _, last = name.rpartition(".")
        found.setdefault(module, Module(module)).tensors[last] = entry
    return found


def describe(entry: TensorEntry) -> str:
    """A tensor for a message."""
    return f"{entry.name!r} {entry.dtype} {list(entry.shape)}"


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[a, 1, b, 1] as [a, b]: how ModelOpt writes block scales."""
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def _only(module: Module, allowed: set[str]) -> None:
    """Raises InputError if the module holds scales that do not belong to its form."""
    if odd := sorted(module.tensors.keys() & {*SCALES, *WORDS} - allowed):
        raise InputError(f"{describe(module.tensors[odd[0]])} does not belong to a weight with {sorted(allowed)}")


def _need(module: Module, last: str, dtypes: tuple[str, ...]) -> TensorEntry:
    entry = module.tensors.get(last)
    if entry is None:
        raise InputError(f"{module.name!r} lacks its {last}: a quantised weight without its scale")
    if entry.dtype not in dtypes:
        raise InputError(f"{describe(entry)}: expected {' or '.join(dtypes)}")
    return entry


def _nvfp4(module: Module, words: TensorEntry) -> SourceWeight:
    """Direction of the global scale from its name: `weight_scale_2` multiplies, `weight_global_scale` divides."""
    packed = words.name.endswith("weight_packed")
    globals_ = module.tensors.keys() & {"weight_scale_2", "weight_global_scale"}
    if len(globals_) != 1:
        found = " and ".join(sorted(globals_)) or "neither weight_scale_2 nor weight_global_scale"
        raise InputError(f"{module.name!r} has {found}: the direction of its global scale is unknown")
    last = globals_.pop()
    if packed != (last == "weight_global_scale"):
        raise InputError(f"{describe(words)} with {last}: two libraries' conventions in one module")
    scale, whole = _need(module, "weight_scale", ("F8_E4M3",)), _need(module, last, ("F32",))
    _only(module, {words.name.rpartition(".")[2], "weight_scale", last})
    if len(words.shape) != 2 or words.shape[1] % 8 or scale.shape != (words.shape[0], words.shape[1] // 8):
        raise InputError(f"{describe(words)} and {describe(scale)} are not words and scales of groups of 16")
    if _count(whole.shape) != 1:
        raise InputError(f"{describe(whole)}: expected a single global scale")
    parts: dict[PartName, TensorEntry] = {"words": words, "block_scale": scale, "global_scale": whole}
    shape = (words.shape[0], words.shape[1] * 2)
    return SourceWeight(f"{module.name}.weight", shape, "nvfp4/divisor" if packed else "nvfp4", parts)


def _fp8(module: Module, words: TensorEntry, scheme: Scheme) -> SourceWeight:
    last = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
    scale = _need(module, last, FLOATS)
    _only(module, {"weight", last})
    if len(words.shape) != 2:
        raise InputError(f"{describe(words)}: FP8 weights are matrices")
    rows, columns = words.shape
    tile = scheme.tile
    grid = (-(-rows // tile[0]), -(-columns // tile[1]))
    fits: dict[str, tuple[PartName, str]] = {}
    if scale.shape in ((rows,), (rows, 1)):
        fits["row"] = ("row_scale", "fp8_e4m3")
    if _squeezed(scale.shape) == grid:
        fits["tile"] = ("tile_scale", tiled(*tile))
    if _count(scale.shape) == 1:
        fits["tensor"] = ("tensor_scale", "fp8_e4m3/tensor")
    chosen = next((fits[kind] for kind in scheme.scales if kind in fits), None)
    if chosen is None:
        stored = " or ".join(f"one a {kind}" for kind in fits) or "of no known arrangement"
        declared = " or ".join(f"tile of {tile[0]} x {tile[1]}" if kind == "tile" else kind for kind in scheme.scales)
        raise InputError(
            f"{describe(words)} has scales {describe(scale)}, {stored}; {scheme.label!r} declares one a {declared}"
        )
    part, encoding = chosen
    parts: dict[PartName, TensorEntry] = {part: scale, "words": words}
    return SourceWeight(f"{module.name}.weight", words.shape, encoding, parts)


def read_module(module: Module, scheme: Scheme) -> SourceWeight:
    """The quantised weight of a module under a declared scheme.

    Raises InputError, without the file's name, if what is stored is incomplete or not what is declared.
    """
    words = module.words
    if words is None:
        raise InputError(f"{module.name!r} has scales ({', '.join(sorted(module.tensors))}) but no weight")
    if "weight" in module.tensors and "weight_packed" in module.tensors:
        raise InputError(f"{module.name!r} has both weight and weight_packed")
    kind = {"U8": "nvfp4", "F8_E4M3": "fp8_e4m3"}.get(words.dtype)
    if words.dtype in PLAIN_OF_DTYPE:
        raise InputError(f"{describe(words)} is stored plain, but has quantised scales beside it")
    if kind is None:
        raise InputError(f"{describe(words)}: no words that this duovolt reads (U8 for nvfp4, F8_E4M3)")
    if kind != scheme.words:
        raise InputError(f"{describe(words)} is stored as {kind}, but {scheme.label!r} declares {scheme.words}")
    weight = _nvfp4(module, words) if kind == "nvfp4" else _fp8(module, words, scheme)
    direction = {"nvfp4": "multiplier", "nvfp4/divisor": "divisor"}.get(weight.encoding)
    if direction is not None and direction not in scheme.scales:
        raise InputError(f"{module.name!r} has a global {direction}, but {scheme.label!r} means another convention")
    return weight
