"""One converted or rank directory, opened for its proofs: manifest, headers, and everything that speaks for itself."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..checkpoint.bands import canonical_rows
from ..checkpoint.directory import INDEX, MANIFEST, QUARANTINE, Checkpoint, read_json
from ..checkpoint.encodings import INDEX_ENCODINGS, STORED_AS_IS, encoding_parts, part_name
from ..checkpoint.errors import CheckFailed, DuovoltError, InputError
from ..checkpoint.layouts import ROWS, layout_named, stored_shape
from ..checkpoint.manifest import Manifest, TensorRecord, has_manifest, read_manifest, without_manifest
from ..model.config import ModelConfig
from ..model.inventory import DRAFT_IDS, TensorSpec, inventory
from .form import check_form
from .report import Proof, Report


@dataclass
class StageView:
    """A directory with a sound manifest. `checkpoint` and `config` are None if headers or configuration are damaged.

    `digests` are those of the tensors' bytes as read, filled by the scan.
    """

    path: Path
    label: str
    manifest: Manifest
    checkpoint: Checkpoint | None
    config: ModelConfig | None
    digests: dict[str, str] = field(default_factory=dict)

    def file(self, name: str) -> str:
        """Path of the file that holds a tensor, for messages."""
        record = self.manifest.tensors.get(name)
        return str(self.path / record.file) if record is not None else str(self.path)

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of a stored tensor, layout undone: raw words. A scalar is a row of its own.

        Raises CheckFailed if headers and manifest do not agree on what is stored.
        """
        record = self.manifest.tensors.get(name)
        entry = self.checkpoint.tensors.get(name) if self.checkpoint is not None else None
        if record is None or entry is None:
            raise CheckFailed(f"{self.label} has no readable {name!r}")
        shape = stored_shape(record.layout, record.dtype, tuple(record.canonical_shape))
        if entry.dtype != record.dtype or list(entry.shape) != record.shape or shape != entry.shape:
            raise CheckFailed(
                f"{self.label} stores {name!r} as {entry.dtype} {list(entry.shape)}, recorded as {record.dtype} "
                f"{record.shape} in {record.layout}"
            )
        if layout_named(record.layout) is None:
            return canonical_rows(entry, record, first, last)
        low, high = first // ROWS * ROWS, -(-last // ROWS) * ROWS  # the tiles that hold these rows
        return canonical_rows(entry, record, low, high)[first - low : last - low]


def _read_manifest(path: Path, label: str, report: Report) -> Manifest | None:
    proof = report.begin(f"{label}: manifest")
    if not path.is_dir():
        raise InputError(f"{path}: not a directory.")
    if not has_manifest(path):
        raise InputError(without_manifest(path))
    try:
        manifest = read_manifest(path)
        if (path / MANIFEST).read_bytes() != manifest.encode():
            proof.fail("is not in the form in which it is written: it was edited", file=str(path / MANIFEST))
    except DuovoltError as error:
        proof.fail(str(error))
        return None
    proof.detail = f"{len(manifest.tensors)} tensors, {len(manifest.files)} files, conversion {manifest.conversion_id}"
    return manifest


def open_stage(path: Path, label: str, report: Report) -> StageView | None:
    """Open a directory; None if its manifest is damaged. Raises InputError if there is none."""
    manifest = _read_manifest(path, label, report)
    if manifest is None:
        return None
    proof = report.begin(f"{label}: headers and index")
    checkpoint, config = None, None
    try:
        checkpoint = Checkpoint.open(path)
        _check_headers(checkpoint, manifest, proof)
        if proof.status == "proved":
            check_form(checkpoint, manifest, proof)
    except (DuovoltError, OSError) as error:
        proof.fail(str(error))
    try:
        config = ModelConfig.of_stage(read_json(path / "config.json"), manifest, str(path / "config.json"))
    except (DuovoltError, OSError) as error:
        proof.fail(str(error))
    _check_strangers(path, manifest, proof)
    proof.detail = f"{len(checkpoint.tensors)} tensors placed alike by all" if checkpoint else "not readable"
    return StageView(path, label, manifest, checkpoint, config)


def _check_headers(checkpoint: Checkpoint, manifest: Manifest, proof: Proof) -> None:
    """Index, headers and manifest hold the same tensors, of the same dtype and shape, in the same files."""
    identity = {
        "format": "pt",
        "duovolt.format_version": str(manifest.format_version),
        "duovolt.conversion_id": manifest.conversion_id,
    }
    if manifest.stage == "rank":
        identity |= {"duovolt.tp_size": str(manifest.tp_size), "duovolt.tp_rank": str(manifest.tp_rank)}
    for header in checkpoint.headers.values():
        for key in sorted(identity.keys() | header.metadata.keys()):
            if (found := header.metadata.get(key)) != identity.get(key):
                proof.fail(
                    f"__metadata__ {key!r}", file=str(header.path), found=repr(found), expected=repr(identity.get(key))
                )
    for name, entry in checkpoint.tensors.items():
        record = manifest.tensors.get(name)
        if record is None:
            proof.fail("stored, but the manifest does not know it", tensor=name, file=str(entry.path))
            continue
        stored, said = f"{entry.dtype} {list(entry.shape)}", f"{record.dtype} {record.shape}"
        if stored != said or entry.path.name != record.file:
            proof.fail(
                "stored otherwise than the manifest says", tensor=name, file=str(entry.path),
                found=f"{stored} in {entry.path.name}", expected=f"{said} in {record.file}",
            )  # fmt: skip
    for name in manifest.tensors.keys() - checkpoint.tensors.keys():
        proof.fail(
            "in the manifest, but not stored", tensor=name, file=str(checkpoint.path / manifest.tensors[name].file)
        )


def _check_strangers(path: Path, manifest: Manifest, proof: Proof) -> None:
    known = manifest.files.keys() | {MANIFEST, QUARANTINE}
    for child in sorted(path.iterdir()):
        if child.name not in known:
            proof.fail(
                "not in the manifest: nothing may lie here that the stage did not write", file=str(child), extra=True
            )
    shards = {record.file for record in manifest.tensors.values()}
    for needed in sorted(shards | {INDEX, "config.json"}):
        if needed not in manifest.files:
            proof.fail("the manifest does not list this file", file=str(path / needed))


def expected_parts(spec: TensorSpec, record: TensorRecord) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """stored name -> (part, dtype, canonical shape of the whole) of a weight whose first record is `record`.

    Raises InputError for an encoding that is unknown or cannot store this shape.
    """
    if (record.encoding in INDEX_ENCODINGS) != (spec.name == DRAFT_IDS):
        raise InputError(f"encoding {record.encoding!r} is for ids alone, and ids have no other")
    if record.encoding in STORED_AS_IS:
        return {spec.name: ("plain", STORED_AS_IS[record.encoding], spec.shape)}
    parts = encoding_parts(record.encoding)
    if parts is None or len(spec.shape) != 2:
        raise InputError(f"encoding {record.encoding!r} cannot store {list(spec.shape)}")
    return {part_name(spec.name, part): (part.name, part.dtype, part.shape(*spec.shape)) for part in parts}


def whole_shapes(view: StageView) -> dict[str, tuple[int, ...]]:
    """stored name -> canonical shape of the whole, for every tensor that the inventory accounts for."""
    shapes: dict[str, tuple[int, ...]] = {}
    if view.config is None:
        return shapes
    for spec in inventory(view.config).values():
        record = view.manifest.tensors.get(spec.name)
        if record is not None:
            try:
                shapes |= {name: shape for name, (_, _, shape) in expected_parts(spec, record).items()}
            except InputError:
                continue  # the inventory proof has named it
    return shapes


def prove_inventory(view: StageView, report: Report) -> None:
    """The manifest holds exactly the family's tensors, each stored as its encoding and layout demand.

    Canonical shapes of a rank's parts are the partition proof's matter.
    """
    name = f"{view.label}: closed inventory"
    if view.config is None:
        report.skip(name, "the configuration is not readable")
        return
    proof = report.begin(name)
    specs = inventory(view.config)
    expected: set[str] = set()
    for spec in specs.values():
        first = view.manifest.tensors.get(spec.name)
        if first is None:
            proof.fail("missing: the family has it, the manifest does not", tensor=spec.name)
            continue
        try:
            parts = expected_parts(spec, first)
        except InputError as error:
            proof.fail(str(error), tensor=spec.name)
            continue
        expected |= parts.keys()
        for stored, (part, dtype, shape) in parts.items():
            record = view.manifest.tensors.get(stored)
            if record is None:
                proof.fail(f"missing: the {part} of a {first.encoding} weight", tensor=stored)
                continue
            found = (record.weight, record.part, record.encoding, record.dtype)
            if found != (wanted := (spec.name, part, first.encoding, dtype)):
                proof.fail("recorded as another part", tensor=stored, found=str(found), expected=str(wanted))
            if view.manifest.stage == "converted" and tuple(record.canonical_shape) != shape:
                proof.fail("shape", tensor=stored, found=str(record.canonical_shape), expected=str(list(shape)))
            _check_layout(stored, record, proof)
            if not record.sources:
                proof.fail("has no source", tensor=stored)
    for stored in sorted(view.manifest.tensors.keys() - expected):
        proof.fail("extra: the family does not have it", tensor=stored)
    proof.detail = f"{len(specs)} weights in {len(view.manifest.tensors)} tensors, none missing, none extra"


def _check_layout(name: str, record: TensorRecord, proof: Proof) -> None:
    try:
        stored = stored_shape(record.layout, record.dtype, tuple(record.canonical_shape))
    except InputError as error:
        proof.fail(str(error), tensor=name)
        return
    if tuple(record.shape) != stored:
        proof.fail(f"stored shape in {record.layout}", tensor=name, found=str(record.shape), expected=str(list(stored)))
