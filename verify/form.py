"""Headers and index in the very form in which they are written: what no tensor's digest covers is covered byte for byte."""

from ..checkpoint.directory import INDEX, Checkpoint, index_bytes
from ..checkpoint.errors import naming
from ..checkpoint.files import file_metadata
from ..checkpoint.manifest import Manifest
from ..checkpoint.writer import Planned, encode_header
from .report import Proof


def check_form(checkpoint: Checkpoint, manifest: Manifest, proof: Proof) -> None:
    """Compare every shard's header, and the index, with what the manifest's own records give.

    They must agree in what they say already. A header edited to say the same in other words (or padding, or another
    order of keys) is found here, though digests were made to fit it.
    """
    metadata = file_metadata(manifest.conversion_id, manifest.tp_size, manifest.tp_rank)
    for header in checkpoint.headers.values():
        tensors = [Planned(entry.name, entry.dtype, entry.shape) for entry in header.tensors.values()]
        wanted = encode_header(tensors, metadata)
        with naming(header.path), header.path.open("rb") as handle:
            if handle.read(len(wanted)) != wanted:
                proof.fail("its header is not in the form in which it is written: it was edited", file=str(header.path))
    total = sum(entry.nbytes for entry in checkpoint.tensors.values())
    wanted = index_bytes({name: record.file for name, record in manifest.tensors.items()}, total)
    if (checkpoint.path / INDEX).read_bytes() != wanted:
        proof.fail("is not in the form in which it is written: it was edited", file=str(checkpoint.path / INDEX))
