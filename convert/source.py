"""The source checkpoint: opened, checked against the family from headers alone, then read once for its facts.

The facts (digests, largest magnitudes) decide every scale and the conversion id before a byte of output is written.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..checkpoint.container import NUMPY_DTYPE, TensorEntry, blocks
from ..checkpoint.digest import BLOCK
from ..checkpoint.directory import DOWNLOAD_RECORD, Checkpoint
from ..checkpoint.download_record import read_record
from ..checkpoint.encodings import PLAIN_OF_DTYPE, PartName
from ..checkpoint.encodings.plain import to_float32
from ..checkpoint.errors import CheckFailed, InputError, naming
from ..checkpoint.manifest import FileRecord, has_manifest
from ..checkpoint.sources import SourceForm, read_form, without_quantisation
from ..checkpoint.sources.base import SourceWeight
from ..checkpoint.sources.values import bad_value, refusal
from ..model.config import ModelConfig, without_mtp
from ..model.inventory import EMBED, HEAD, TensorSpec, check_closed
from ..model.names import family_names

Advance = Callable[[int], None]

# Magnitude bits, and the first magnitude that is not finite, of each dtype seen as an unsigned integer.
MAGNITUDE = {"BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F32": (0x7FFF_FFFF, 0x7F80_0000)}


MTP = "mtp"
TIED = "equal to the embedding, to which the configuration ties it"


@dataclass(frozen=True)
class TensorFacts:
    """What one pass learned: xxh3-128 of the bytes; `row_amax` float32 [rows] for plain matrices, [1] for the rest.

    `nonzero`: how many values of a plain tensor are not zero.
    """

    digest: str
    row_amax: np.ndarray
    nonzero: int = 0


@dataclass(frozen=True)
class Source:
    """A source that passed the checks on its headers.

    config   the model as it will be converted: without an MTP layer where neither source has one
    weights  family name -> how the source, or the second one, stores it
    dropped  source tensors that nothing is made from -> why
    absent   parts that the configuration declares and the source lacks
    second   where a missing part was taken from
    notices  what was odd and is handled
    """

    checkpoint: Checkpoint
    config: ModelConfig
    specs: dict[str, TensorSpec]
    form: SourceForm
    weights: dict[str, SourceWeight]
    dropped: dict[str, str]
    absent: list[str]
    second: Checkpoint | None
    notices: list[str]

    @staticmethod
    def open(path: Path, mtp_from: Path | None = None) -> "Source":
        """Raises InputError for another family, an incomplete, contradictory or already converted directory."""
        checkpoint = _open_checkpoint(path)
        where = str(path)
        config = ModelConfig.from_dict(checkpoint.config, str(path / "config.json"))
        form = read_form(checkpoint)
        weights = _by_family_name(form, where)
        dropped, absent, notices = dict(form.dropped), [], checkpoint.notices + form.notices
        has_mtp = any(name.startswith("mtp.") for name in weights)
        second = None
        if mtp_from is not None:
            second, more = _second(mtp_from, has_mtp, config, where)
            weights |= more
            notices.append(f"the MTP layer ({len(more)} tensors) is taken from the second source")
        elif config.mtp_layers and not has_mtp:
            absent.append(MTP)
            config = replace(config, mtp_layers=0)
            notices.append(
                "the MTP layer is missing: the configuration declares one, the source has no mtp.* tensor (its exporter "
                "dropped it). The result serves without drafts; --mtp-from DIR takes it from another source"
            )
        if config.tie_word_embeddings and HEAD in weights:
            _drop_tied_head(weights, dropped, where)
        if form.dropped:
            notices.append(f"{len(form.dropped)} tensors are not needed and left out: {_kinds(form.dropped)}")
        specs = check_closed(config, {name: weight.shape for name, weight in weights.items()}, where)
        for name, weight in weights.items():
            plain = weight.parts.get("plain")
            if plain is not None and plain.dtype not in PLAIN_OF_DTYPE:
                raise InputError(f"{plain.path}: tensor {name!r} is {plain.dtype}; plain weights are BF16, F16 or F32.")
        return Source(checkpoint, config, specs, form, weights, dropped, absent, second, notices)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor that is read, by its name in its source: all of the source's, and what the second one gives."""
        taken = {entry.name: entry for weight in self.weights.values() for entry in weight.parts.values()}
        return dict(self.checkpoint.tensors) | taken

    @property
    def parts(self) -> dict[str, PartName]:
        """source tensor -> the part of a weight that it is; what is dropped is not among them."""
        return {entry.name: part for weight in self.weights.values() for part, entry in weight.parts.items()}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def converted_config(self) -> dict[str, Any]:
        """config.json of the result: without quantisation, and without an MTP layer that is not there."""
        plain = without_quantisation(self.checkpoint.config)
        return without_mtp(plain) if MTP in self.absent else plain

    def counts(self) -> dict[str, int]:
        """Weights of each part of the model: nothing of text, MTP or vision may go missing unnoticed."""
        counts = {"text": 0, "mtp": 0, "vision": 0}
        for spec in self.specs.values():
            counts[spec.group] += 1
        return counts

    def provenance(self) -> dict[str, Any]:
        """Repository, revision and commit, as the downloads recorded them (if they did); weights of each part."""
        found = _recorded(self.checkpoint.path) | {"weights": self.counts()}
        if self.second is not None:
            found["mtp_from"] = _recorded(self.second.path)
        return found


def _recorded(path: Path) -> dict[str, Any]:
    record = read_record(path)
    return {} if record is None else {"repo": record.repo, "revision": record.revision, "commit": record.commit}


def _open_checkpoint(path: Path) -> Checkpoint:
    if path.is_dir() and has_manifest(path):
        raise InputError(f"{path}: already converted by duovolt (it has a manifest). Give the source directory.")
    if path.is_dir() and not (path / DOWNLOAD_RECORD).exists() and any(path.glob(".*.part")):
        raise InputError(f"{path}: unfinished download. Run the same `duovolt download` again; it resumes.")
    checkpoint = Checkpoint.open(path)
    record = read_record(path)
    if record is not None and (lost := [name for name in record.files if not (path / name).is_file()]):
        raise InputError(
            f"{path}: {len(lost)} of the files that {DOWNLOAD_RECORD} lists are missing: {', '.join(lost[:8])}. Run the "
            f"same `duovolt download` again, or remove {DOWNLOAD_RECORD} if they went on purpose."
        )
    return checkpoint


def _by_family_name(form: SourceForm, where: str) -> dict[str, SourceWeight]:
    return {kept: form.weights[found] for kept, found in family_names(form.weights, where).items()}


def _kinds(dropped: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for name in dropped:
        last = name.rpartition(".")[2]
        counts[last] = counts.get(last, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _second(path: Path, has_mtp: bool, config: ModelConfig, where: str) -> tuple[Checkpoint, dict[str, SourceWeight]]:
    """The MTP weights of another source of the same model. Raises InputError if they are not missing, or not there."""
    if has_mtp:
        raise InputError(f"{where}: has its own MTP layer; --mtp-from is for sources that lack it.")
    if not config.mtp_layers:
        raise InputError(
            f"{where}: its configuration has no MTP layer (mtp_num_hidden_layers); --mtp-from adds nothing."
        )
    checkpoint = _open_checkpoint(path)
    other = ModelConfig.from_dict(checkpoint.config, str(path / "config.json"))
    if replace(other.text, vocab_size=0) != replace(config.text, vocab_size=0):
        raise InputError(f"{path}: --mtp-from: another model than {where}: their text_config differ.")
    found = {n: w for n, w in _by_family_name(read_form(checkpoint), str(path)).items() if n.startswith("mtp.")}
    if not found:
        raise InputError(f"{path}: --mtp-from: has no mtp.* tensor either.")
    return checkpoint, found


def _drop_tied_head(weights: dict[str, SourceWeight], dropped: dict[str, str], where: str) -> None:
    """A head that the configuration ties to the embedding is left out; that it is equal, the scan proves."""
    head, embed = weights.pop(HEAD), weights.get(EMBED)
    same = embed is not None and (head.encoding, head.shape) == (embed.encoding, embed.shape)
    if not same or "plain" not in head.parts:
        raise InputError(
            f"{where}: tie_word_embeddings is true, but lm_head is stored too, as {head.encoding} {list(head.shape)}, and "
            "is not the embedding. Which one holds?"
        )
    dropped[head.parts["plain"].name] = TIED


def _non_finite(entry: TensorEntry, flat: int, word: np.ndarray) -> InputError:
    index = [int(n) for n in np.unravel_index(flat, entry.shape)] if entry.shape else []
    value = to_float32(word.view(NUMPY_DTYPE[entry.dtype]), entry.dtype)[0]
    return InputError(
        f"{entry.path}: tensor {entry.name!r} holds {value} at index {index}: the source is damaged or was "
        "never finite. Fetch it again and compare its digest."
    )


def _scan_quantised(entry: TensorEntry, part: PartName | None, blocks: Iterable[memoryview]) -> TensorFacts:
    """Digest of a tensor that is no plain weight, and that it holds no value that must not be there."""
    digest, done = xxhash.xxh3_128(), 0
    for block in blocks:
        digest.update(block)
        words = np.frombuffer(block, NUMPY_DTYPE[entry.dtype])
        if part is not None and (bad := bad_value(part, entry.dtype, words)) is not None:
            raise refusal(entry, done + bad[0], bad[1])
        done += len(words)
    return TensorFacts(digest.hexdigest(), np.zeros(1, np.float32))


def _scan(entry: TensorEntry, blocks: Iterable[memoryview]) -> TensorFacts:
    """Digest and largest magnitudes of one plain tensor. `blocks` come in whole rows for matrices.

    Magnitudes of floating-point words order as integers, so the maximum needs no conversion and is exact.
    """
    mask, infinite = MAGNITUDE[entry.dtype]
    unsigned: np.dtype[Any] = np.dtype("<u2") if mask == 0x7FFF else np.dtype("<u4")
    columns = entry.shape[1] if len(entry.shape) == 2 else max(1, entry.nbytes // unsigned.itemsize)
    digest = xxhash.xxh3_128()
    tops: list[np.ndarray] = []
    done = nonzero = 0
    for block in blocks:
        digest.update(block)
        words: np.ndarray = np.frombuffer(block, unsigned) & unsigned.type(mask)
        top = words.reshape(-1, columns).max(axis=1) if len(entry.shape) == 2 else words.max(keepdims=True)
        if top.max(initial=0) >= infinite:
            at = int(np.argmax(words >= infinite))
            raise _non_finite(entry, done + at, np.frombuffer(block, unsigned)[at : at + 1])
        tops.append(top)
        nonzero += int(np.count_nonzero(words))
        done += len(words)
    top = np.concatenate(tops) if tops else np.zeros(1, unsigned)
    if len(entry.shape) != 2:
        top = top.max(keepdims=True)
    return TensorFacts(digest.hexdigest(), to_float32(top.view(NUMPY_DTYPE[entry.dtype]), entry.dtype), nonzero)


def row_band(entry: TensorEntry, block_bytes: int = BLOCK, multiple: int = 1) -> int:
    """Bytes of a band of whole rows (a multiple of `multiple` rows) near `block_bytes`; whole words for non-matrices."""
    if len(entry.shape) != 2 or not entry.nbytes:
        return block_bytes
    row = entry.nbytes // entry.shape[0]
    return max(multiple, block_bytes // row // multiple * multiple) * row


def _scan_file(source: Source, file: str, advance: Advance) -> tuple[FileRecord, dict[str, TensorFacts]]:
    header = source.checkpoint.headers[file]
    whole = xxhash.xxh3_128()
    data_start = min((entry.begin for entry in header.tensors.values()), default=header.size)
    with naming(header.path), header.path.open("rb") as handle:
        whole.update(handle.read(data_start))

    def seen(block: memoryview) -> None:
        whole.update(block)
        advance(len(block))

    # In the order of their data, so that the file's digest comes along.
    facts = _scan_tensors(source, list(header.tensors.values()), seen)
    return FileRecord(size=header.size, digest=whole.hexdigest()), facts


def _scan_tensors(
    source: Source, entries: list[TensorEntry], seen: Callable[[memoryview], object]
) -> dict[str, TensorFacts]:
    parts = source.parts
    facts: dict[str, TensorFacts] = {}

    def bytes_of(entry: TensorEntry) -> Iterable[memoryview]:
        for block in blocks(entry, row_band(entry)):
            seen(block)
            yield block

    for entry in entries:
        part = parts.get(entry.name)
        plain = part == "plain" or source.dropped.get(entry.name) == TIED
        facts[entry.name] = _scan(entry, bytes_of(entry)) if plain else _scan_quantised(entry, part, bytes_of(entry))
    return facts


@dataclass(frozen=True)
class SourceFacts:
    """Facts of every tensor, by its name in its source, and size and digest of every shard of the first source."""

    tensors: dict[str, TensorFacts]
    files: dict[str, FileRecord]


def scan(source: Source, workers: int, advance: Advance) -> SourceFacts:
    """Read the whole source once. Raises InputError naming tensor and index of a value that is not finite."""
    tensors: dict[str, TensorFacts] = {}
    files: dict[str, FileRecord] = {}
    with ThreadPoolExecutor(workers) as pool:
        names = sorted(source.checkpoint.headers)
        for name, (record, facts) in zip(names, pool.map(lambda n: _scan_file(source, n, advance), names), strict=True):
            files[name] = record
            tensors |= facts
    more = [entry for name, entry in source.entries.items() if name not in tensors]
    tensors |= _scan_tensors(source, more, lambda block: advance(len(block)))
    _require_tied(source, tensors)
    return SourceFacts(tensors, files)


def _require_tied(source: Source, facts: dict[str, TensorFacts]) -> None:
    """Raises InputError if a head that the configuration ties to the embedding has other bytes."""
    for name in (name for name, why in source.dropped.items() if why == TIED):
        embed = source.weights[EMBED].parts["plain"].name
        if facts[name].digest != facts[embed].digest:
            raise InputError(
                f"{source.checkpoint.path}: tie_word_embeddings is true, but {name!r} and {embed!r} are stored with "
                "different bytes. Which one holds?"
            )


def require_unchanged(entry: TensorEntry, expected: str, digest: str) -> None:
    """Raises CheckFailed if the second pass over a tensor read other bytes than the first."""
    if digest != expected:
        raise CheckFailed(f"{entry.path}: tensor {entry.name!r} changed between two reads. Nothing was finished.")
