"""API keys: the server's, of which there may be several, and the one that the terminal client sends."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from ...checkpoint.errors import InputError


class KeyRing:
    """The keys that a server accepts; without any it accepts everyone.

    Digests of equal length are compared, and always all of them, so that the time tells nothing of a key.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def admits(self, given: str) -> bool:
        """True if `given` is one of the keys, or no key is needed."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) or not matches


def read_keys(path: Path | None) -> list[str]:
    """The keys in a file, one a line, empty lines and white space around keys dropped; none without a file.

    Raises InputError for a file without a key and for what is no key.
    """
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"--api-key-file {path}: byte {error.start} is not ASCII, which a key must be.") from error
    except OSError as error:
        raise InputError(f"--api-key-file {path}: {error.strerror}.") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InputError(f"--api-key-file {path} is empty; write a key into it, one a line.")
    for number, key in enumerate(keys, 1):
        if not key.isprintable():
            raise InputError(f"--api-key-file {path}: key {number} holds a character that cannot be printed.")
    return keys


def read_key(path: Path | None) -> str | None:
    """The first key in a file, for a client; None without a file. Raises InputError as read_keys."""
    keys = read_keys(path)
    return keys[0] if keys else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
