"""`duovolt dequantize DIR DST`."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ..checkpoint.digest import json_bytes
from ..checkpoint.directory import DOWNLOAD_RECORD, Checkpoint
from ..checkpoint.errors import CheckFailed, InputError
from ..checkpoint.manifest import Manifest, has_manifest, read_manifest
from ..checkpoint.sources import HF_QUANT_CONFIG, read_form, without_quantisation
from ..checkpoint.sources.values import check_values
from ..convert.dequantize import (
    DTYPES,
    ConvertedReader,
    PlainTensor,
    converted_tensors,
    source_tensors,
    write_plain,
)
from ..convert.facts import fingerprint
from ..verify.join import Joined
from ..verify.ranks import open_ranks, rank_directories
from ..verify.report import Report
from ..verify.stage import whole_shapes
from .progress import byte_bar
from .reads import ALWAYS, Reads

EXAMPLE = """example:
  duovolt dequantize converted plain --dtype bfloat16
  duovolt dequantize ranks plain

The result is a plain Hugging Face checkpoint: quantised weights decoded, everything else word for word.
An interrupted run is resumed by the same command."""


READS = Reads({ALWAYS: "directory target dtype"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a source, converted or rank directory, or all ranks"
    )
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write (new or empty)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="of decoded weights (default: bfloat16)"
    )


@dataclass(frozen=True)
class _JoinedReader:
    """Canonical rows of whole tensors, joined from all ranks."""

    joined: Joined

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        band = self.joined.band(name, first, last)
        self.joined.require_covered(band, first)
        return band.words


def _whole_manifest(manifest: Manifest, shapes: dict[str, tuple[int, ...]]) -> Manifest:
    """A rank's manifest with the extents of the whole: what the joined tensors are.

    Raises CheckFailed for a tensor that is not the family's.
    """
    if strange := sorted(manifest.tensors.keys() - shapes.keys()):
        raise CheckFailed(f"the ranks hold {strange[0]!r}, which the family does not have. Run `duovolt verify`.")
    tensors = {
        name: msgspec.structs.replace(record, canonical_shape=list(shapes[name]))
        for name, record in manifest.tensors.items()
    }
    return msgspec.structs.replace(manifest, tensors=tensors)


def tensors_of(directory: Path, dtype: str) -> tuple[list[PlainTensor], Path, list[str]]:
    """The plain tensors of any directory we read, where its side files lie, and what was odd.

    Raises InputError, CheckFailed.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory.")
    if has_manifest(directory) and (manifest := read_manifest(directory)).stage == "converted":
        reader = ConvertedReader(Checkpoint.open(directory), manifest)
        return list(converted_tensors(manifest, reader, dtype)), directory, []
    if has_manifest(directory) or any(directory.glob("rank-*-of-*")):
        report = Report()
        ranks = open_ranks(directory, report)
        if ranks is None or not report.ok:
            raise CheckFailed(str(report.failed[0].failures[0]) + " Run `duovolt verify` for the whole picture.")
        if not ranks.complete:
            raise InputError(f"{directory}: not every rank is here; a whole checkpoint needs them all.")
        first = ranks.views[0]
        shapes = whole_shapes(first)
        joined = _JoinedReader(ranks.joined(shapes))
        return list(converted_tensors(_whole_manifest(first.manifest, shapes), joined, dtype)), first.path, []
    form = read_form(Checkpoint.open(directory))
    for weight in form.weights.values():
        check_values(weight)
    notices = list(form.notices)
    if form.dropped:
        notices.append(f"{len(form.dropped)} scales of activations and of the KV cache left out")
    return list(source_tensors(form, dtype)), directory, notices


def side_files_of(directory: Path) -> dict[str, Path | bytes]:
    """Side files of the plain checkpoint: those of the directory, without what they say of quantisation."""
    checkpoint = Checkpoint.open(directory)
    left_out = (DOWNLOAD_RECORD, HF_QUANT_CONFIG)
    found: dict[str, Path | bytes] = {n: directory / n for n in checkpoint.side_files if n not in left_out}
    if (plain := without_quantisation(checkpoint.config)) != checkpoint.config:
        found["config.json"] = json_bytes(plain)
    return found


def run(args: argparse.Namespace) -> int:
    tensors, origin, notices = tensors_of(args.directory, DTYPES[args.dtype])
    if args.directory.resolve() in (args.target.resolve(), *args.target.resolve().parents):
        raise InputError(f"{args.target}: lies in {args.directory}. Choose another place.")
    side_files = side_files_of(origin)
    inputs = [args.directory] if origin == args.directory else rank_directories(args.directory)
    made_from = fingerprint(inputs, args.dtype)
    total = sum(tensor.nbytes for tensor in tensors)
    with byte_bar("dequantize", total, args.quiet) as advance:
        written = write_plain(tensors, side_files, args.target, advance, made_from)
    if not args.quiet:
        for notice in notices:
            print(f"notice: {notice}")
        print(f"{len(tensors)} tensors, {written / 1e6:,.2f} MB in {args.target} ({args.dtype})")
    return 0
