"""Who owns a file or folder that outlives its process: pid and start time, so that a reused pid is no owner.

Containers may share a folder and not their process numbers: a name also says whose numbers it means.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

_NAME = re.compile(r"^\.?duovolt-(\d+)-(\d+)-(?:(\d+)-)?[0-9a-f]{8}$")


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of /proc/PID/stat); None if it is gone or a zombie.

    Raises OSError where the system does not tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()  # the name in parentheses may hold anything
    return None if fields[0] in b"ZX" else int(fields[19])


def owned_name() -> str:
    """A fresh name `duovolt-PID-START-NAMESPACE-RANDOM` that belongs to this process."""
    pid = os.getpid()
    return f"duovolt-{pid}-{start_time(pid)}-{_namespace()}-{secrets.token_hex(4)}"


def owner_is_dead(name: str) -> bool:
    """True if `name` is one of ours (a leading dot marks an unfinished one) and its owner no longer runs.

    False where that cannot be told: an owner whose process numbers are another container's, or hidden.
    """
    match = _NAME.match(name)
    if match is None or (match[3] is not None and int(match[3]) != _namespace()):
        return False
    try:
        return start_time(int(match[1])) != int(match[2])
    except OSError:
        return False


def _namespace() -> int:
    """Which process numbers are meant here; 0 where the system does not tell."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
