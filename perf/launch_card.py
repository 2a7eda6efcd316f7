"""Sections of a card file from measured launches: what every model has, whatever its shapes."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from .launch_file import LaunchTimes, printable
from .savings import kind_name, savings_of

# Kernels that hardly touch memory; a call of sampling_adjust has another launch in it, one of attention its merge.
SMALL = (
    "rms_norm", "rms_norm_delta", "gated_rms_norm", "qkv_rope_int8", "qkv_rope_fp16", "embed", "embed_fp32", "elementwise",
    "round_rows", "round_advance", "round_scatter",
)  # fmt: skip


def sections(files: Sequence[LaunchTimes]) -> str:
    """[small]'s gaps, [kernel_us] and [overlap] as lines of TOML, microseconds: means over what was measured."""
    lines = [_remark(f"`bench launches --card-file`, of {_sources(files)}")]
    chains = [chain for file in files for chain in file.chains if not chain.fault]
    lines += [
        _remark(f"left out, {chain.model}, {chain.tp} ranks, {chain.lanes} lanes: {chain.fault}")
        for file in files
        for chain in file.chains
        if chain.fault
    ]
    overlapped = [gap for chain in chains if (gap := chain.gap_overlapped) is not None]
    if chains:
        lines += ["[small]", f"gap_us = {1e6 * fmean(chain.gap for chain in chains):.2f}"]
    if overlapped:
        lines.append(f"gap_overlapped_us = {1e6 * fmean(overlapped):.2f}")
    lines += ["", "[kernel_us]"]
    for name in SMALL:
        times = [
            one.seconds for file in files for one in file.launches if one.seconds and one.key.partition(" ")[0] == name
        ]
        if times:
            lines.append(f"{name} = {1e6 * fmean(times):.1f}")
    kinds = savings_of((edge for file in files for edge in file.edges), {}).kinds
    if kinds:
        lines += ["", "[overlap]"]
        lines += sorted(
            f'"{kind_name(names)}" = {1e6 * saved:.2f}' for names, saved in kinds.items() if len(names) == 2
        )
    return "\n".join(lines) + "\n"


def _remark(text: str) -> str:
    """A comment of one line, whatever names a file of measurements holds."""
    return f"# {printable(text)}"


def _sources(files: Iterable[LaunchTimes]) -> str:
    return "; ".join(f"{', '.join(file.models)} on {file.machine.named}" for file in files)
