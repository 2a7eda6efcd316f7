"""`duovolt plan SRC`: every tensor's fate and every byte, from headers alone; writes nothing."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.directory import Checkpoint
from ..checkpoint.errors import EnvironmentFault, InputError, without_effect
from ..checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    SourceRecord,
    has_manifest,
    read_manifest,
)
from ..convert.plan import PlannedPart, plan_conversion, tensor_records
from ..convert.recipe import DEFAULT_RECIPE, load_recipe
from ..convert.source import Source
from ..model.config import FAMILY, ModelConfig
from ..model.inventory import inventory
from ..model.memory import kv_bytes_per_token, state_bytes
from ..model.partition import MAX_RANKS
from ..shard.plan import plan_rank
from .numbers import positions, whole
from .reads import ALWAYS, Reads

EXAMPLE = """example:
  duovolt plan Qwen3.8-27B --tp 2 --max-context 262144
  duovolt plan converted --tp 4 --json"""

CARD_BYTES = (32 << 30) - 700_000_000  # of a 32 GB V100, what driver and context leave
AUTO = 0
PLANNED_DRAFTS, PLANNED_CHUNK = 3, 2048  # the server's defaults


READS = Reads({ALWAYS: "source recipe mtp_from tp max_context kv json"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", type=Path, metavar="SRC", help="a source or converted directory")
    parser.add_argument("--recipe", help="built-in recipe or TOML file (default: v100)")
    parser.add_argument("--mtp-from", type=Path, metavar="DIR", help="as for convert")
    parser.add_argument("--tp", type=whole, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--max-context",
        type=positions(1),
        metavar="N",
        help="positions, or auto: the longest that fits a 32 GB card (default: the model's own limit)",
    )
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="form of the KV cache (default: int8)")
    parser.add_argument("--json", action="store_true", help="machine-readable, every tensor")


@dataclass(frozen=True)
class PlannedResult:
    """What `convert` would write, digests left empty, or what is there; `made` tells how each stored tensor comes about."""

    manifest: Manifest
    config: ModelConfig
    made: dict[str, str]
    notices: list[str]
    dropped: dict[str, str]


def _made(part: PlannedPart) -> str:
    if part.gather is not None or part.encoding == "int32":
        return "chosen rows of the head" if part.gather is not None else "ids of the chosen rows"
    if part.part == "plain":
        return "kept as the source has it" if part.stored.dtype == part.origin.dtype else f"cast to {part.encoding}"
    return "kept as the source has it" if part.imported else "quantised"


def planned(source_path: Path, recipe_name: str | None, mtp_from: Path | None = None) -> PlannedResult:
    """The plan of a source, or the record of a converted directory. Raises InputError for what is refused."""
    if has_manifest(source_path):
        manifest = read_manifest(source_path)
        if manifest.stage != "converted":
            raise InputError(f"{source_path}: a rank directory; plan its source or converted directory.")
        for option, stated in (("--recipe", recipe_name), ("--mtp-from", mtp_from)):
            if stated is not None:
                raise without_effect(option, f"{source_path} is converted already, and its manifest says how")
        config = ModelConfig.of_stage(Checkpoint.open(source_path).config, manifest, str(source_path / "config.json"))
        return PlannedResult(manifest, config, {}, [], manifest.source.dropped)
    source = Source.open(source_path, mtp_from)
    recipe = load_recipe(DEFAULT_RECIPE if recipe_name is None else recipe_name)
    plan = plan_conversion(source, recipe)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        stage="converted",
        family=FAMILY,
        conversion_id="",
        recipe=recipe.resolved(),
        tp_size=None,
        tp_rank=None,
        tensors=tensor_records(plan, lambda name: "", lambda name: ""),
        files={},
        source=SourceRecord(quantization_config=None, hf_quant_config=None, files={}),
        provenance={},
    )
    made = {name: _made(part) for name, part in plan.parts.items()}
    config = source.config.with_draft_head(recipe.draft_head)
    return PlannedResult(manifest, config, made, source.notices, source.dropped)


def _ranks(manifest: Manifest, config: ModelConfig, tp: int, where: str) -> list[dict[str, Any]]:
    ranks = []
    for rank in range(tp):
        parts = [part for group in plan_rank(manifest, config, tp, rank, where) for part in group]
        ranks.append(
            {
                "rank": rank,
                "bytes": sum(part.stored.nbytes for part in parts),
                "replicated_bytes": sum(part.stored.nbytes for part in parts if part.axis is None),
                "parts": {part.name: {"axis": part.axis, "ranges": part.ranges} for part in parts},
            }
        )
    return ranks


def _tensors(manifest: Manifest, config: ModelConfig, made: dict[str, str]) -> list[dict[str, Any]]:
    specs = inventory(config)
    stored = {
        name: {"encoding": r.encoding, "layout": r.layout, "dtype": r.dtype, "shape": r.shape, "file": r.file}
        for name, r in manifest.tensors.items()
    }
    return [
        {
            "name": name,
            "weight": record.weight,
            "role": specs[record.weight].role,
            "part_of_the_model": specs[record.weight].group,
            "source_dtype": record.sources[0].dtype if record.sources else None,
            "source_shape": record.sources[0].shape if record.sources else None,
            **({"made": made[name]} if made else {}),
            **stored[name],
        }
        for name, record in manifest.tensors.items()
    ]


def facts(
    path: Path, recipe: str | None, tp: int, max_context: int | None, kv: str, mtp_from: Path | None = None
) -> dict[str, Any]:
    """Everything `plan` prints, as JSON values. `max_context` None: the model's own limit; AUTO: the longest that fits.

    Raises InputError with the reason for a model that is refused, EnvironmentFault for AUTO if no context fits.
    """
    if not 1 <= tp <= MAX_RANKS:
        raise InputError(f"--tp {tp}: expected 1 to {MAX_RANKS}.")
    result = planned(path, recipe, mtp_from)
    manifest, config = result.manifest, result.config
    limit = config.text.max_position_embeddings
    context = limit if max_context in (None, AUTO) else max_context
    if not 1 <= context <= limit:
        raise InputError(f"--max-context {context}: the model has 1 to {limit} positions.")
    ranks = _ranks(manifest, config, tp, str(path))
    source = Checkpoint.open(path)
    weights = max(rank["bytes"] for rank in ranks)
    card = _card(config, tp, kv, weights, context, manifest, path)
    if max_context == AUTO:
        context = _longest(card, tp)
        card = _card(config, tp, kv, weights, context, manifest, path)
    return {
        "recipe": manifest.recipe["name"],
        "source_bytes": sum(entry.nbytes for entry in source.tensors.values()),
        "converted_bytes": sum(entry["bytes"] for entry in _by_encoding(manifest).values()),
        "by_encoding": _by_encoding(manifest),
        "tp": tp,
        "ranks": ranks,
        "kv": kv,
        "kv_bytes_per_token": kv_bytes_per_token(config, tp, kv),
        "state_bytes": state_bytes(config, tp),
        "max_context": context,
        **card,
        "notices": result.notices,
        "dropped": result.dropped,
        "tensors": _tensors(manifest, config, result.made),
    }


def _longest(card: dict[str, Any], tp: int) -> int:
    """What `auto` comes to. Raises InputError without kernels, EnvironmentFault if not even a page fits."""
    if card["missing_kernels"]:
        missing = "; ".join(card["missing_kernels"])
        raise InputError(f"--max-context auto: the CUDA engine has no kernels for this model: {missing}.")
    if not (longest := card["longest_context_32_gb"]):
        raise EnvironmentFault(
            f"--max-context auto: no context fits a 32 GB card beside the weights of one of {tp} ranks. Split over more "
            "cards, or convert with a smaller recipe."
        )
    return int(longest)


def _card(
    config: ModelConfig, tp: int, kv: str, weights: int, context: int, manifest: Manifest, path: Path
) -> dict[str, Any]:
    """One rank's card with one lane: the parts of its memory as the server plans them, and the longest context that fits."""
    from ..runtime.engine.cuda.fitness import needs_of, unread_forms
    from ..runtime.engine.cuda.plan import MARGIN, Demand, longest_context, plain_bytes, plan_memory, room_to_keep
    from ..runtime.engine.pages import pages_for
    from ..runtime.images.processor import ImageProcessor

    missing = [str(need) for need in needs_of(config, tp) if not need.met] + unread_forms(manifest)
    if missing:
        needed = weights + kv_bytes_per_token(config, tp, kv) * context + state_bytes(config, tp)
        return {
            "card_memory": {}, "card_bytes_needed": needed, "fits_32_gb_card": needed < CARD_BYTES,
            "longest_context_32_gb": None, "plain_weights_32_gb": 0, "plain_weights_share": 0.0,
            "missing_kernels": missing,
        }  # fmt: skip
    vision, patches, tower = config.vision, 0, 0
    if vision is not None:
        processor = ImageProcessor.read(path, vision)
        patches = processor.max_pixels // processor.patch**2
        groups = {name: spec.group for name, spec in inventory(config).items()}
        from ..checkpoint.writer import Planned

        tower = sum(
            Planned(name, record.dtype, tuple(record.shape)).nbytes
            for name, record in manifest.tensors.items()
            if groups[record.weight] == "vision"
        )
    demand = Demand(
        config, tp, weights, kv, 1, PLANNED_DRAFTS if config.mtp_layers else 0, PLANNED_CHUNK, vision=tower,
        picture_patches=patches, keys_in_a_row=False, keep=None,
    )  # fmt: skip
    memory = plan_memory(demand, context, pages_for(context))
    limit = config.text.max_position_embeddings
    return {
        "card_memory": memory.parts,
        "card_bytes_needed": memory.total,
        "fits_32_gb_card": memory.total + MARGIN <= CARD_BYTES,
        "longest_context_32_gb": longest_context(demand, CARD_BYTES - MARGIN, limit),
        "plain_weights_32_gb": (stay := room_to_keep(demand, CARD_BYTES - MARGIN - memory.total)),
        "plain_weights_share": stay / plain_bytes(config, tp),
        "missing_kernels": [],
    }


def _by_encoding(manifest: Manifest) -> dict[str, dict[str, int]]:
    from ..checkpoint.writer import Planned

    found: dict[str, dict[str, int]] = {}
    for name, record in manifest.tensors.items():
        entry = found.setdefault(record.encoding, {"weights": 0, "bytes": 0})
        entry["weights"] += record.part in ("plain", "words")
        entry["bytes"] += Planned(name, record.dtype, tuple(record.shape)).nbytes
    return dict(sorted(found.items()))


def _print(found: dict[str, Any]) -> None:
    print(f"recipe {found['recipe']}: {found['source_bytes'] / 1e6:,.2f} MB here, "
          f"{found['converted_bytes'] / 1e6:,.2f} MB converted")  # fmt: skip
    for notice in found["notices"]:
        print(f"notice: {notice}.")
    by_role: dict[tuple[str, str, str, str], int] = {}
    for tensor in found["tensors"]:
        if tensor["name"] == tensor["weight"]:
            key = (
                tensor["part_of_the_model"],
                tensor["role"].split("visual.")[0] or "visual",
                tensor["encoding"],
                tensor["layout"],
            )
            by_role[key] = by_role.get(key, 0) + 1
    axes = {name: part["axis"] for name, part in found["ranks"][0]["parts"].items()}
    kinds = {t["role"]: axes.get(t["name"]) for t in found["tensors"] if t["name"] == t["weight"]}
    cut = {None: "replicated", 0: "column parallel", 1: "row parallel"}
    for (group, role, encoding, layout), count in by_role.items():
        print(f"  {group:<6} {role:<26} x{count:<4} {encoding:<16} {layout:<12} {cut[kinds.get(role)]}")
    for rank in found["ranks"]:
        both = rank["replicated_bytes"] / 1e6
        print(f"rank {rank['rank']} of {found['tp']}: {rank['bytes'] / 1e6:,.2f} MB, {both:,.2f} of it on every rank")
    state = found["state_bytes"] / 1e6
    print(
        f"KV ({found['kv']}): {found['kv_bytes_per_token']:,} bytes a token; state {state:,.2f} MB a sequence; per rank"
    )
    if found["missing_kernels"]:
        print(f"the CUDA engine has no kernels for this model: {'; '.join(found['missing_kernels'])}")
    for name, nbytes in found["card_memory"].items():
        if nbytes:
            print(f"  {name:<13} {nbytes / 1e9:8.3f} GB a card")
    verdict = "fits" if found["fits_32_gb_card"] else "does not fit"
    longest = found["longest_context_32_gb"]
    print(
        f"one sequence of {found['max_context']:,} positions needs {found['card_bytes_needed'] / 1e9:,.2f} GB a card: "
        f"{verdict} a 32 GB card" + (f"; the longest context that fits is {longest:,}" if longest is not None else "")
    )
    if stay := found["plain_weights_32_gb"]:
        print(
            f"prompts are read faster with {stay / 1e9:,.2f} GB that such a card has left: "
            f"{found['plain_weights_share']:.0%} of their plain weights stay"
        )


def run(args: argparse.Namespace) -> int:
    found = facts(args.source, args.recipe, args.tp, args.max_context, args.kv, args.mtp_from)
    if args.json:
        print(json.dumps(found, indent=1))
    elif not args.quiet:
        _print(found)
    return 0
