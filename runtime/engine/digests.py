"""The digests of weight files and their tensors against the manifest: one wording of what is wrong, whoever reads them."""

import xxhash

from ...checkpoint.container import Header, TensorEntry
from ...checkpoint.digest import file_blocks
from ...checkpoint.directory import Checkpoint
from ...checkpoint.errors import CheckFailed, InputError
from ...checkpoint.manifest import Manifest


def check_tensor(entry: TensorEntry, manifest: Manifest, found: str) -> None:
    """Raises CheckFailed if the tensor's digest is not the manifest's."""
    if found != (wanted := manifest.tensors[entry.name].digest):
        raise CheckFailed(
            f"{entry.path}: tensor {entry.name!r} has the digest {found}, the manifest says {wanted}: the file "
            "is damaged. Run `duovolt verify`, which can repair it, or make this directory again."
        )


def check_file(header: Header, manifest: Manifest, found: str) -> None:
    """Raises CheckFailed if the file's digest is not the manifest's."""
    if found != (wanted := manifest.files[header.path.name].digest):
        raise CheckFailed(
            f"{header.path}: the file has the digest {found}, the manifest says {wanted}: it is damaged. Run `duovolt "
            "verify`, or make this directory again."
        )


def check_sizes(headers: list[Header], manifest: Manifest) -> None:
    """Raises InputError for a file that is not of the manifest's size, or holds a tensor that the manifest does not know."""
    for header in headers:
        record = manifest.files.get(header.path.name)
        unknown = [name for name in header.tensors if name not in manifest.tensors]
        if record is None or record.size != header.size or unknown:
            here = {name for name, one in manifest.tensors.items() if one.file == header.path.name}
            missing = f", and lacks {min(gone)!r}" if (gone := here - header.tensors.keys()) else ""
            what = (
                f"holds tensor {unknown[0]!r}, which the manifest does not know{missing}"
                if unknown
                else f"is {header.size} bytes, the manifest says {'nothing of it' if record is None else record.size}"
            )
            raise InputError(f"{header.path}: {what}. Make this directory again.")


def check_digests(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Read every weight file once, a few MB at a time, for its digest and its tensors'.

    Raises CheckFailed naming the tensor, or the file if no tensor is at fault; InputError as `check_sizes`, and for a file
    that ends early.
    """
    headers = list(checkpoint.headers.values())
    check_sizes(headers, manifest)
    for header in headers:
        whole, part, at = xxhash.xxh3_128(), xxhash.xxh3_128(), 0
        entries = sorted(header.tensors.values(), key=lambda entry: (entry.begin, entry.end))
        for block in file_blocks(header.path):
            end, view = at + len(block), memoryview(block)
            whole.update(view)
            while entries and entries[0].begin < end:
                entry = entries[0]
                part.update(view[max(entry.begin, at) - at : min(entry.end, end) - at])
                if entry.end > end:
                    break
                check_tensor(entry, manifest, part.hexdigest())
                part.reset()
                entries.pop(0)
            at = end
        if at != header.size:
            raise InputError(f"{header.path}: ends at byte {at}; the file changed while being read.")
        for entry in entries:  # without bytes, at the file's end
            check_tensor(entry, manifest, part.hexdigest())
        check_file(header, manifest, whole.hexdigest())
