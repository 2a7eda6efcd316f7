"""Who owns a file or folder that outlives its process: pid and start time, so that a reused pid is no owner."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

_NAME = re.compile(r"^\.?duovolt-(\d+)-(\d+)-[0-9a-f]{8}$")


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of /proc/PID/stat); None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


def owned_name() -> str:
    """A fresh name `duovolt-PID-START-RANDOM` that belongs to this process."""
    pid = os.getpid()
    return f"duovolt-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"


def owner_is_dead(name: str) -> bool:
    """True if `name` is one of ours (a leading dot marks an unfinished one) and its owner no longer runs."""
    match = _NAME.match(name)
    return match is not None and start_time(int(match[1])) != int(match[2])
