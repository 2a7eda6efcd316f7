"""The partition table for tensor parallelism: role -> rule, as data, and the one small function that applies it.

A rule names the axis and the sections that are cut; each section is cut by whole heads (or single rows, for MLP and
vocabulary). Source: Megatron's column/row split, with the gated delta network's three sections cut one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoint.errors import InputError
from .config import ModelConfig, TextConfig
from .inventory import TensorSpec

MAX_RANKS = 64


@dataclass(frozen=True)
class Section:
    """`units` heads (or rows) of `width` elements each, side by side along the axis.

    `shared`: more ranks than units are allowed, and each unit then lies on several ranks (kv heads).
    """

    units: int
    width: int
    unit_name: str
    shared: bool = False


@dataclass(frozen=True)
class Rule:
    """Cut along `axis`, section by section. Axis None: replicated on every rank."""

    axis: int | None
    sections: Callable[[TextConfig], tuple[Section, ...]] | None = None


@dataclass(frozen=True)
class Split:
    """What each rank holds: `ranges[rank]` are [start, stop) along `axis`, concatenated in order.

    Axis None: every rank holds the whole, and `ranges` is empty.
    """

    axis: int | None
    ranges: tuple[tuple[tuple[int, int], ...], ...]


def _query_heads(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.num_attention_heads, 2 * text.head_dim, "attention heads"),)


def _output_heads(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.num_attention_heads, text.head_dim, "attention heads"),)


def _kv_heads(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.num_key_value_heads, text.head_dim, "kv heads", shared=True),)


def _mixed_heads(text: TextConfig) -> tuple[Section, ...]:
    key = Section(text.linear_num_key_heads, text.linear_key_head_dim, "linear key heads")
    value = Section(text.linear_num_value_heads, text.linear_value_head_dim, "linear value heads")
    return (key, key, value)


def _value_rows(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.linear_num_value_heads, text.linear_value_head_dim, "linear value heads"),)


def _value_heads(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.linear_num_value_heads, 1, "linear value heads"),)


def _inner(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.intermediate_size, 1, "MLP rows"),)


def _vocabulary(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.vocab_size, 1, "vocabulary rows"),)


def _draft_rows(text: TextConfig) -> tuple[Section, ...]:
    return (Section(text.draft_rows, 1, "rows of the draft head"),)


REPLICATED = Rule(None)

# Column parallel: output axis 0. Row parallel: input axis 1, followed by an all-reduce. Everything else is replicated.
TABLE: dict[str, Rule] = {
    "self_attn.q_proj": Rule(0, _query_heads),  # query and gate of a head stay together
    "self_attn.k_proj": Rule(0, _kv_heads),
    "self_attn.v_proj": Rule(0, _kv_heads),
    "self_attn.o_proj": Rule(1, _output_heads),
    "linear_attn.in_proj_qkv": Rule(0, _mixed_heads),  # three sections: never one contiguous half
    "linear_attn.conv1d": Rule(0, _mixed_heads),
    "linear_attn.in_proj_z": Rule(0, _value_rows),
    "linear_attn.in_proj_a": Rule(0, _value_heads),
    "linear_attn.in_proj_b": Rule(0, _value_heads),
    "linear_attn.A_log": Rule(0, _value_heads),
    "linear_attn.dt_bias": Rule(0, _value_heads),
    "linear_attn.out_proj": Rule(1, _value_rows),
    "mlp.gate_proj": Rule(0, _inner),
    "mlp.up_proj": Rule(0, _inner),
    "mlp.down_proj": Rule(1, _inner),
    "lm_head": Rule(0, _vocabulary),
    "draft_head": Rule(0, _draft_rows),
    "draft_head.ids": Rule(0, _draft_rows),
}


def _section_range(section: Section, start: int, rank: int, tp: int, name: str) -> tuple[int, int]:
    if section.units % tp == 0:
        share = section.units // tp
        first = rank * share
    elif section.shared and tp % section.units == 0:
        share, first = 1, rank * section.units // tp
    else:
        raise InputError(
            f"{name}: {section.units} {section.unit_name} cannot be shared out over {tp} ranks"
            f"{' (nor the other way round)' if section.shared else ''}. Choose another --tp."
        )
    return start + first * section.width, start + (first + share) * section.width


def split_of(spec: TensorSpec, config: ModelConfig, tp: int) -> Split:
    """How `spec` is cut over `tp` ranks, in logical elements. Raises InputError with the numbers if it cannot be."""
    if not 1 <= tp <= MAX_RANKS:
        raise InputError(f"{tp} ranks: expected 1 to {MAX_RANKS}.")
    rule = REPLICATED if spec.group == "vision" else TABLE.get(spec.role, REPLICATED)
    if rule.axis is None or rule.sections is None:
        return Split(None, ())
    sections = rule.sections(config.text)
    covered = sum(section.units * section.width for section in sections)
    if covered != spec.shape[rule.axis]:
        raise InputError(f"{spec.name}: sections cover {covered} of {spec.shape[rule.axis]} along axis {rule.axis}.")
    ranges = []
    for rank in range(tp):
        start, mine = 0, []
        for section in sections:
            mine.append(_section_range(section, start, rank, tp, spec.name))
            start += section.units * section.width
        ranges.append(tuple(mine))
    return Split(rule.axis, tuple(ranges))
