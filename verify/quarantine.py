"""Moving what is bad aside: a rename into a hidden folder of the same directory, never a deletion."""

from pathlib import Path

from ..checkpoint.directory import QUARANTINE
from ..checkpoint.errors import InputError
from ..checkpoint.stage import disk_errors, sync_directory, write_event


def quarantine(root: Path, path: Path) -> Path:
    """Move `path`, which lies in `root`, to `root`/.duovolt-bad/NAME.bad-N, with the first N that is free.

    The caller holds the directory's lock. Returns the new place. Raises InputError if `path` is not below `root`, or a
    link stands where the folder should, EnvironmentFault if the disk refuses.
    """
    name = path.relative_to(root)
    folder = root / QUARANTINE
    if ".." in name.parts or not name.parts:
        raise InputError(f"{path}: does not lie in {root}; left where it is.")
    if any((root / parent).is_symlink() for parent in (Path(QUARANTINE), *list(name.parents)[:-1])):
        raise InputError(f"{path}: a link lies on the way there or to {folder}; nothing was moved. Remove the link.")
    with disk_errors(root):
        place = folder / name.parent
        place.mkdir(parents=True, exist_ok=True)
        number = 1
        while (place / f"{name.name}.bad-{number}").exists() or (place / f"{name.name}.bad-{number}").is_symlink():
            number += 1
        target = place / f"{name.name}.bad-{number}"
        write_event()
        path.rename(target)
        sync_directory(place)
        sync_directory(path.parent)
    return target
