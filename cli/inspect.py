"""`duovolt inspect DIR`: headers, manifest and totals; reads no weights."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import PLAIN_OF_DTYPE
from ..checkpoint.errors import InputError
from ..checkpoint.manifest import Manifest, has_manifest, read_manifest
from ..checkpoint.sources import read_form
from ..model.config import ModelConfig
from ..model.inventory import inventory
from ..model.names import family_name
from .reads import ALWAYS, Reads

LEFT_OUT = "left out"  # scales of activations and of the KV cache, which no weight needs

EXAMPLE = """example:
  duovolt inspect converted
  duovolt inspect ranks/rank-0-of-2 --tensor lm_head.weight
  duovolt inspect Qwen3.8-27B --json"""


READS = Reads({ALWAYS: "directory tensor json"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("directory", type=Path, metavar="DIR", help="a source, converted or rank directory")
    parser.add_argument("--tensor", metavar="NAME", help="everything known of one tensor")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _totals(rows: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for key, nbytes in rows:
        entry = totals.setdefault(key, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += nbytes
    return dict(sorted(totals.items()))


def _recorded(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """stored tensor -> encoding and logical weight, by the manifest's word."""
    return {name: (record.encoding, record.weight) for name, record in manifest.tensors.items()}


def _declared(checkpoint: Checkpoint, notices: list[str]) -> dict[str, tuple[str, str]]:
    """The same for a source; where it contradicts itself, that is a notice, and dtypes must do."""
    try:
        form = read_form(checkpoint)
    except InputError as error:
        notices.append(str(error))
        return {
            name: (PLAIN_OF_DTYPE.get(e.dtype, e.dtype), family_name(name)) for name, e in checkpoint.tensors.items()
        }
    notices += form.notices
    kinds = {
        entry.name: (weight.encoding, family_name(weight.name))
        for weight in form.weights.values()
        for entry in weight.parts.values()
    }
    return kinds | dict.fromkeys(form.dropped, (LEFT_OUT, ""))


def facts(directory: Path) -> dict[str, Any]:
    """Everything `inspect` prints, as JSON values. Raises InputError for an unreadable directory."""
    checkpoint = Checkpoint.open(directory)
    manifest = read_manifest(directory) if has_manifest(directory) else None
    where = str(directory / "config.json")
    if manifest:
        config = ModelConfig.of_stage(checkpoint.config, manifest, where)
    else:
        config = ModelConfig.from_dict(checkpoint.config, where)
    groups = {name: spec.group for name, spec in inventory(config).items()}
    notices = list(checkpoint.notices)
    kinds = _recorded(manifest) if manifest else _declared(checkpoint, notices)
    encodings, parts = [], []
    for name, entry in checkpoint.tensors.items():
        encoding, weight = kinds.get(name, (PLAIN_OF_DTYPE.get(entry.dtype, entry.dtype), name))
        encodings.append((encoding, entry.nbytes))
        parts.append((encoding if encoding == LEFT_OUT else groups.get(weight, "unknown"), entry.nbytes))
    found: dict[str, Any] = {
        "directory": str(directory),
        "stage": manifest.stage if manifest else "source",
        "files": {name: header.size for name, header in checkpoint.headers.items()},
        "side_files": checkpoint.side_files,
        "tensors": len(checkpoint.tensors),
        "bytes": sum(entry.nbytes for entry in checkpoint.tensors.values()),
        "by_encoding": _totals(encodings),
        "by_part_of_the_model": _totals(parts),
        "notices": notices,
    }
    if manifest:
        found |= _identity(manifest) | {"draft_head": config.text.draft_rows}
    return found


def _identity(manifest: Manifest) -> dict[str, Any]:
    layouts: dict[str, int] = {}
    for record in manifest.tensors.values():
        layouts[record.layout] = layouts.get(record.layout, 0) + 1
    return {
        "conversion_id": manifest.conversion_id,
        "recipe": manifest.recipe.get("name"),
        "tp_size": manifest.tp_size,
        "tp_rank": manifest.tp_rank,
        "layouts": layouts,
        "provenance": manifest.provenance,
    }


def _tensor(directory: Path, name: str) -> dict[str, Any]:
    checkpoint = Checkpoint.open(directory)
    if name not in checkpoint.tensors:
        near = [other for other in checkpoint.tensors if name in other][:4]
        raise InputError(f"{directory}: no tensor {name!r}.{' Did you mean ' + ', '.join(near) + '?' if near else ''}")
    entry = checkpoint.tensors[name]
    found: dict[str, Any] = {
        "name": name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "file": entry.path.name,
        "begin": entry.begin,
        "end": entry.end,
    }
    if has_manifest(directory):
        import msgspec

        found["manifest"] = msgspec.to_builtins(read_manifest(directory).tensors.get(name))
    return found


def _print(found: dict[str, Any]) -> None:
    rank = f", rank {found['tp_rank']} of {found['tp_size']}" if found.get("tp_size") else ""
    print(f"{found['directory']}: {found['stage']}{rank}")
    if "conversion_id" in found:
        draft = f", draft head of {found['draft_head']:,} rows" if found["draft_head"] else ""
        print(f"  conversion {found['conversion_id']}, recipe {found['recipe']}{draft}")
    print(f"  {found['tensors']} tensors, {found['bytes'] / 1e6:,.2f} MB in {len(found['files'])} files")
    for title in ("by_encoding", "by_part_of_the_model"):
        print(f"  {title.replace('_', ' ')}:")
        for key, total in found[title].items():
            print(f"    {key:<16} {total['tensors']:>6} tensors {total['bytes'] / 1e6:>14,.2f} MB")
    if "layouts" in found:
        print("  layouts: " + ", ".join(f"{count} {name}" for name, count in sorted(found["layouts"].items())))
    print(f"  side files: {', '.join(found['side_files']) or 'none'}")
    for notice in found["notices"]:
        print(f"  notice: {notice}")


def run(args: argparse.Namespace) -> int:
    found = _tensor(args.directory, args.tensor) if args.tensor else facts(args.directory)
    if args.json or args.tensor:
        print(json.dumps(found, indent=2))
    elif not args.quiet:
        _print(found)
    return 0
