"""Whether a process that loads still gets anywhere: seen from outside, by the processor time that it takes.

A rank that reads weights, compiles or proves its links takes some; one that is stopped, or waits for what never comes,
takes none. Nothing is asked of the rank, so nothing of it needs to work.
"""

from __future__ import annotations

from pathlib import Path

from .silence import Silence


class LoadWatch:
    """The signs of life of the processes `pids`, read at each `look`."""

    def __init__(self, pids: list[int]) -> None:
        self._silences = {pid: Silence() for pid in pids}

    def look(self, pid: int) -> float:
        """Seconds since the process was first seen with the processor time that it has now."""
        return self._silences[pid].look(_processor_ticks(pid))


def _processor_ticks(pid: int) -> int:
    """User and system time of all threads and of children that have ended (fields 14 to 17 of /proc/PID/stat); 0 if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))
