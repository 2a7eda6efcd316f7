"""What the CUDA engine's kernels ask of a model: checked from the configuration, before any weight is read."""

from dataclasses import dataclass

from ....checkpoint.errors import InputError
from ....checkpoint.manifest import Manifest
from ....kernels import attention, delta, kvcache, norm, rope
from ....kernels.weights import GROUP
from ....model.config import ModelConfig, TextConfig
from ....model.inventory import EMBED

_MOST_QUERIES = 40  # query heads a KV head: five tiles of eight rows (kernels/attention.py)


@dataclass(frozen=True)
class Need:
    """One thing that a kernel is built for: its name, what the model has, and what there is."""

    kernel: str
    what: str
    found: str
    present: str
    met: bool

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what} {self.found}, built for {self.present}"


def needs_of(config: ModelConfig, tp: int) -> list[Need]:
    """Everything that the kernels ask of a model that is split over `tp` ranks."""
    text = config.text
    kv_heads = max(1, text.num_key_value_heads // tp)
    group = text.num_attention_heads // tp // kv_heads
    needs = [
        _exactly("attention", "head dimension", text.head_dim, kvcache.DIM),
        _upto("attention", "query heads a KV head", group, _MOST_QUERIES),
        _exactly("rotary embedding", "turned pairs", text.rotary_dim // 2, rope.PAIRS),
        _upto("norm", "hidden size", text.hidden_size, norm.MAX_COLUMNS),
    ]
    if any(kind != "full_attention" for kind in text.layer_types):
        needs += [
            _exactly("delta rule", "key head dimension", text.linear_key_head_dim, delta.HEAD),
            _exactly("delta rule", "value head dimension", text.linear_value_head_dim, delta.HEAD),
            _exactly("delta rule", "convolution width", text.linear_conv_kernel_dim, delta.TAPS),
        ]
    for name, columns in _columns(text, tp).items():
        needs.append(Need("linear", f"columns of {name}", str(columns), f"multiples of {GROUP}", columns % GROUP == 0))
    return needs


def takes_quantised(weight: str, dimensions: int) -> bool:
    """Whether the engine reads a weight as words with scales: matrices, but for the embedding, of which rows are looked up."""
    return dimensions == 2 and weight != EMBED


def unread_forms(manifest: Manifest) -> list[str]:
    """Weights of a conversion that are stored in a form that the engine does not take, each with what it does take."""
    return [
        f"{record.weight} stored as {record.encoding}, taken as bf16, fp16 or fp32"
        for record in manifest.tensors.values()
        if record.part == "words" and not takes_quantised(record.weight, len(record.canonical_shape))
    ]


def check_fitness(config: ModelConfig, tp: int, where: str) -> None:
    """Raises InputError with the list of what is needed and what there is, if a kernel for this model is missing."""
    if missing := [str(need) for need in needs_of(config, tp) if not need.met]:
        raise InputError(
            f"{where}: the CUDA engine has no kernels for this model. {'; '.join(missing)}. Serve it with "
            "--backend reference."
        )


def check_limits(lanes: int, drafts: int) -> None:
    """Raises InputError for more lanes or drafts than the kernels take."""
    if not 1 <= lanes <= attention.MAX_SEQUENCES:
        raise InputError(f"{lanes} lanes: the CUDA engine takes 1 to {attention.MAX_SEQUENCES}.")
    if not 0 <= drafts < attention.MAX_TOKENS:
        raise InputError(f"{drafts} drafts: the CUDA engine takes 0 to {attention.MAX_TOKENS - 1}.")


def _columns(text: TextConfig, tp: int) -> dict[str, int]:
    """Columns of the matrices on a rank, by role."""
    return {
        "the hidden size": text.hidden_size,
        "o_proj": text.num_attention_heads * text.head_dim // tp,
        "out_proj": text.value_dim // tp,
        "down_proj": text.intermediate_size // tp,
    }


def _exactly(kernel: str, what: str, found: int, present: int) -> Need:
    return Need(kernel, what, str(found), str(present), found == present)


def _upto(kernel: str, what: str, found: int, most: int) -> Need:
    return Need(kernel, what, str(found), f"at most {most}", 1 <= found <= most)
