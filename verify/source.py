"""Source to converted: kept words are equal, quantised values are within half a step, nothing is missing."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..checkpoint.bands import CanonicalReader, DecodedWeight
from ..checkpoint.container import NUMPY_DTYPE, TensorEntry, blocks, read_range
from ..checkpoint.digest import digest_blocks, digest_file
from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import PLAIN_OF_DTYPE
from ..checkpoint.encodings.plain import from_float32, to_float32
from ..checkpoint.encodings.weights import weights_of
from ..checkpoint.errors import DuovoltError, InputError
from ..checkpoint.manifest import Manifest, SourceRef, TensorRecord
from ..checkpoint.sources import declaration_of, read_form, without_quantisation
from ..checkpoint.sources.stored import ACTIVATION_SCALES
from ..model.config import ModelConfig, without_mtp
from ..model.inventory import DRAFT_HEAD, DRAFT_IDS, EMBED, HEAD, inventory
from ..model.names import family_name
from .errors import ALLOWANCES, PLAIN, Allowance, ErrorSums, fp8_bound, nvfp4_bound
from .identity import prove_identity
from .report import ErrorRow, Proof, Report
from .stage import StageView
from .whole import UNREADABLE
from .words import bands_of, first_difference
from .workers import Advance, run_beside

SLAB = 64 << 10  # elements measured at a time, so that the float64 temporaries stay in the core's cache
QUANTISATION_FILES = {"hf_quant_config.json"}  # would lie about the converted directory; kept inside the manifest


def open_source(path: Path, report: Report) -> Checkpoint | None:
    """The source; None if its headers are damaged. Raises InputError if there is none."""
    if not path.is_dir():
        raise InputError(f"{path}: not a directory.")
    proof = report.begin("source: headers and index")
    try:
        checkpoint = Checkpoint.open(path)
    except (DuovoltError, OSError) as error:
        proof.fail(str(error))
        return None
    proof.detail = f"{len(checkpoint.tensors)} tensors"
    return checkpoint


def quantised_here(parts: dict[str, TensorRecord]) -> bool:
    """True if all parts of a weight come from one floating-point tensor: the conversion chose scales and codes."""
    names = {ref.name for record in parts.values() for ref in record.sources}
    dtypes = {ref.dtype for record in parts.values() for ref in record.sources}
    return "words" in parts and len(names) == 1 and dtypes <= PLAIN_OF_DTYPE.keys()


@dataclass
class _SourceProofs:
    """The proofs that one pass over the source serves, and where the converted words are read from."""

    source: Checkpoint
    reader: CanonicalReader
    advance: Advance
    digests: Proof
    kept: Proof
    quantised: Proof
    allowance: Allowance
    second: list[str]
    errors: list[ErrorRow] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    compared: int = 0
    imported: int = 0

    def of_weight(self, weight: str, names: dict[str, str], parts: dict[str, TensorRecord]) -> "_SourceProofs":
        """What one weight adds; `names` and `parts` by the parts' names."""
        try:
            if quantised_here(parts):
                self.measure(weight, names, parts)
                return self
            for part, name in names.items():
                self.compare_kept(name, parts[part])
                self.compared += 1
            self.imported += "words" in parts
        except (*UNREADABLE, LookupError) as error:
            self.kept.fail(f"cannot be compared: {error}", tensor=weight)
        return self

    def apart(self, advance: Advance) -> "_SourceProofs":
        """Empty proofs of the same kind, for a weight that is compared on another thread."""
        digests, kept, quantised = (Proof(name=proof.name) for proof in (self.digests, self.kept, self.quantised))
        return _SourceProofs(self.source, self.reader, advance, digests, kept, quantised, self.allowance, self.second)

    def take(self, part: "_SourceProofs") -> None:
        """Add what was found apart."""
        self.digests.take(part.digests)
        self.kept.take(part.kept)
        self.quantised.take(part.quantised)
        self.errors += part.errors
        self.seen |= part.seen
        self.elsewhere |= part.elsewhere
        self.compared += part.compared
        self.imported += part.imported

    def entry(self, ref: SourceRef) -> TensorEntry | None:
        """The source tensor that a record names, if its header says the same."""
        entry = self.source.tensors.get(ref.name)
        self.seen.add(ref.name)
        if (
            entry is None
            and self.second
            and family_name(ref.name).startswith(tuple(f"{part}." for part in self.second))
        ):
            self.elsewhere.add(ref.name)
        elif entry is None:
            self.digests.fail("the conversion read it, the source does not have it", tensor=ref.name)
        elif (entry.dtype, list(entry.shape)) != (ref.dtype, ref.shape):
            self.digests.fail("another tensor than was converted", tensor=ref.name, file=str(entry.path),
                              found=f"{entry.dtype} {list(entry.shape)}", expected=f"{ref.dtype} {ref.shape}")  # fmt: skip
            return None
        return entry

    def check_digest(self, ref: SourceRef, entry: TensorEntry, digest: str) -> None:
        if digest != ref.digest:
            self.digests.fail("digest: not the bytes that were converted", tensor=ref.name, file=str(entry.path),
                              found=digest, expected=ref.digest)  # fmt: skip

    def compare_kept(self, name: str, record: TensorRecord) -> None:
        """A stored tensor whose words or values are the source's own."""
        ref = record.sources[0]
        entry = self.entry(ref)
        if entry is None:
            return
        shape = tuple(ref.shape) if record.split is not None else tuple(record.canonical_shape)
        if len(record.sources) != 1 or _count(shape) != _count(tuple(ref.shape)):
            self.kept.fail(f"cannot be compared with {len(record.sources)} sources of {ref.shape}", tensor=name)
            return
        digest, found = xxhash.xxh3_128(), None
        for first, last in bands_of(shape, ref.dtype):
            raw = _rows(entry, shape, first, last)
            digest.update(raw.data)
            self.advance(raw.nbytes)
            if found is None and (found := _unequal(self.reader.rows(name, first, last), record.dtype, raw, ref.dtype)):
                index = [found[0][0] + first, *found[0][1:]]
                self.kept.fail("the word differs from the source's", tensor=name, file=str(entry.path), index=index,
                               found=found[1], expected=found[2])  # fmt: skip
        self.check_digest(ref, entry, digest.hexdigest())

    def measure(self, weight: str, names: dict[str, str], parts: dict[str, TensorRecord]) -> None:
        """A weight that was quantised: the error table's row, and every value within its bound."""
        record = parts["words"]
        ref = record.sources[0]
        entry = self.entry(ref)
        for part, other in parts.items():
            if other.sources != record.sources:
                self.digests.fail("its parts name different sources", tensor=names[part])
        if entry is None:
            return
        decoded_weight = DecodedWeight(weight, {part: (names[part], parts[part]) for part in parts})
        sums, digest, outside = ErrorSums(), xxhash.xxh3_128(), False
        for first, last in bands_of(tuple(ref.shape), "F32"):  # float32 temporaries decide the memory
            raw = _rows(entry, tuple(ref.shape), first, last)
            digest.update(raw.data)
            self.advance(raw.nbytes)
            values = to_float32(raw, ref.dtype)
            decoded = decoded_weight.decode(self.reader, first, last)
            bound = self._bound(names, parts, first, last)
            step = max(1, SLAB // max(1, values.shape[1]))
            for start in range(0, len(values), step):
                rows = slice(start, start + step)
                sums.add(values[rows], decoded[rows])
                beyond = ~(np.abs(values[rows] - decoded[rows]) <= bound(values[rows], rows))
                if not outside and beyond.any():
                    outside = True
                    row, column = (int(n) for n in np.unravel_index(int(np.argmax(beyond)), beyond.shape))
                    at = start + row, column
                    self.quantised.fail("further than half a step from the source", tensor=weight, file=str(entry.path),
                                        index=[at[0] + first, at[1]], found=f"{decoded[at]:.9g}",
                                        expected=f"{values[at]:.9g}")  # fmt: skip
        self.errors.append(sums.row(weight, record.encoding))
        self.check_digest(ref, entry, digest.hexdigest())

    def _bound(
        self, names: dict[str, str], parts: dict[str, TensorRecord], first: int, last: int
    ) -> Callable[[np.ndarray, slice], np.ndarray]:
        """For rows [first, last) of a weight: the largest allowed differences, of values and where they are in the band."""
        if "row_scale" in parts:
            row_scales = self.reader.rows(names["row_scale"], first, last)
            return lambda values, rows: fp8_bound(values, row_scales[rows], self.allowance)
        multiplier = np.float32(self.reader.rows(names["global_scale"], 0, 1).reshape(-1)[0])
        if parts["global_scale"].encoding == "nvfp4/divisor":
            multiplier = np.float32(1) / multiplier  # rounded: far within the slack of the quantiser that divides
        scales = self.reader.rows(names["block_scale"], first, last)
        return lambda values, rows: nvfp4_bound(values, scales[rows], multiplier, self.allowance)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _rows(entry: TensorEntry, shape: tuple[int, ...], first: int, last: int) -> np.ndarray:
    """Rows [first, last) of a source tensor seen as `shape`; a scalar is one row."""
    rows, *inner = shape or (1,)
    row_bytes = entry.nbytes // rows
    raw = read_range(entry, first * row_bytes, last * row_bytes)
    return raw.view(NUMPY_DTYPE[entry.dtype]).reshape(last - first, *inner)


def _unequal(
    stored: np.ndarray, stored_dtype: str, source: np.ndarray, source_dtype: str
) -> tuple[list[int], str, str] | None:
    """First difference in words; in values, rounded once, where they were cast to another floating-point type."""
    if stored_dtype == source_dtype or stored_dtype not in PLAIN_OF_DTYPE:
        return first_difference(stored, source.reshape(stored.shape))
    values = from_float32(to_float32(source, source_dtype), stored_dtype).reshape(stored.shape)
    return first_difference(to_float32(stored, stored_dtype), to_float32(values, stored_dtype))


def _wanted_config(source: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    """The source's configuration without quantisation, and without an MTP layer that is recorded as absent."""
    wanted = without_quantisation(source.config)
    return without_mtp(wanted) if "mtp" in manifest.source.absent else wanted


def _compare_side_files(source: Checkpoint, manifest: Manifest, config: dict[str, Any] | None, report: Report) -> None:
    """Tokenizer, templates and unknown files went over byte for byte; `config` is the converted configuration."""
    proof = report.begin("source -> converted: side files")
    wanted_config = _wanted_config(source, manifest)
    for name in source.side_files:
        path = source.path / name
        if name in QUANTISATION_FILES:
            continue
        record = manifest.files.get(name)
        if record is None:
            proof.fail("in the source, but not carried over", file=str(path))
        elif name == "config.json" and wanted_config != source.config:
            if config != wanted_config:
                proof.fail("not the source's without quantisation and absent parts", file=str(path))
        elif record.digest != (digest := digest_file(path)):
            proof.fail(
                "digest: not the file that was carried over", file=str(path), found=digest, expected=record.digest
            )
    try:
        _, quantization, hf_quant = declaration_of(source)
    except DuovoltError as error:
        proof.fail(str(error))
    else:
        for name, said, kept in (
            ("quantization_config", quantization, manifest.source.quantization_config),
            ("hf_quant_config", hf_quant, manifest.source.hf_quant_config),
        ):
            if said != kept:
                proof.fail(f"the manifest's {name} is not the source's", file=str(source.path))
    proof.detail = f"{len(source.side_files)} files carried over byte for byte"


def _check_dropped(source: Checkpoint, manifest: Manifest, proofs: _SourceProofs) -> None:
    """Nothing was made from these: scales that no weight needs, or a head whose bytes are those of the embedding."""
    for name in manifest.source.dropped:
        entry = source.tensors.get(name)
        if entry is None:
            proofs.digests.fail("recorded as left out, the source does not have it", tensor=name)
            continue
        proofs.seen.add(name)
        if name.rpartition(".")[2] in ACTIVATION_SCALES:
            continue
        embed = next((e for n, e in source.tensors.items() if family_name(n) == EMBED), None)
        if family_name(name) != HEAD or embed is None or digest_blocks(blocks(entry)) != digest_blocks(blocks(embed)):
            proofs.digests.fail(
                "left out, though neither a scale of activations nor a head equal to the embedding",
                tensor=name,
                file=str(entry.path),
            )


def with_second(source: Checkpoint, second: Path) -> Checkpoint:
    """The source, and the MTP tensors of another one. Raises InputError if that cannot be read."""
    other = Checkpoint.open(second)
    taken = {name: entry for name, entry in other.tensors.items() if family_name(name).startswith("mtp.")}
    form = read_form(other)
    return replace(source, tensors={n: e for n, e in taken.items() if n not in form.dropped} | source.tensors)


def _counts(config: ModelConfig) -> dict[str, int]:
    """Weights of each part of the model that have a source of their own."""
    specs = [spec for spec in inventory(config).values() if spec.name not in (DRAFT_HEAD, DRAFT_IDS)]
    return {group: sum(spec.group == group for spec in specs) for group in ("text", "mtp", "vision")}


def prove_source(
    source: Checkpoint, view: StageView, reader: CanonicalReader, report: Report, advance: Advance
) -> None:
    """Compare the source with converted words that `reader` gives: a converted directory's, or those of joined ranks.

    `view` is the converted directory or any of the ranks, for its records.
    """
    manifest = view.manifest
    config = view.checkpoint.config if view.checkpoint is not None else None
    proofs = _SourceProofs(
        source, reader, advance,
        report.begin("source -> converted: source bytes"),
        report.begin("source -> converted: kept words"),
        report.begin("source -> converted: quantised values"),
        ALLOWANCES.get(str(manifest.recipe.get("quantiser")), PLAIN),
        manifest.source.second,
    )  # fmt: skip
    try:
        weights = weights_of(manifest)
    except InputError as error:
        proofs.kept.fail(str(error))
        return
    tasks = []
    for weight, names in weights.items():
        if weight in (DRAFT_HEAD, DRAFT_IDS):  # compared with the head, which is compared here
            continue
        parts = {part: manifest.tensors[name] for part, name in names.items()}
        tasks.append(lambda tell, one=(weight, names, parts): proofs.apart(tell).of_weight(*one))
    for found in run_beside(tasks, advance):
        proofs.take(found)
    report.errors += proofs.errors
    _check_dropped(source, manifest, proofs)
    for name in sorted(source.tensors.keys() - proofs.seen):
        proofs.digests.fail("in the source, but nothing was made from it", tensor=name,
                            file=str(source.tensors[name].path))  # fmt: skip
    _compare_side_files(source, manifest, config, report)
    if proofs.elsewhere or view.config is None:
        report.skip("source -> converted: conversion id", "needs every source, and a readable configuration")
    else:
        prove_identity(source, manifest, _counts(view.config), report)
    if proofs.elsewhere:
        report.notes.append(
            f"{len(proofs.elsewhere)} tensors were taken from a second source: give it with --mtp-from to compare them."
        )
    compared = len(proofs.seen) - len(proofs.elsewhere)
    left_out = f", {len(manifest.source.dropped)} of them left out as recorded" if manifest.source.dropped else ""
    proofs.digests.detail = f"{compared} tensors, each the one that was converted{left_out}"
    repacked = (
        f", among them the words and scales of {proofs.imported} weights that the source has quantised"
        if proofs.imported
        else ""
    )
    proofs.kept.detail = f"{proofs.compared} tensors equal word for word{repacked}"
    proofs.quantised.detail = f"{len(report.errors)} weights, every value within half a step of its encoding"
