"""The API key, read alike by the server and by the terminal client."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.errors import InputError


def read_key(path: Path | None) -> str | None:
    """The key in a file, white space around it dropped; None without a file. Raises InputError for what is no key."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"--api-key-file {path}: byte {error.start} is not ASCII, which a key must be.") from error
    except OSError as error:
        raise InputError(f"--api-key-file {path}: {error.strerror}.") from error
    if not key:
        raise InputError(f"--api-key-file {path} is empty; write the key into it.")
    if not key.isprintable():
        raise InputError(f"--api-key-file {path}: expected one line of printable characters.")
    return key
