"""The machine around the cards, judged: memory, shared memory, disk."""

from collections.abc import Iterator

from .facts import Disk, Facts, Finding

_MEMORY = 8e9
_SHM = 64 << 20
_SLOW_DISK = 200e6


def judge_host(facts: Facts) -> Iterator[Finding]:
    """What does not depend on a card."""
    host = facts.host
    free = f"{host.memory_available / 1e9:.1f} of {host.memory / 1e9:.1f} GB of memory available, {host.cores} cores"
    if host.memory_available < _MEMORY:
        yield Finding(
            "limited", "memory", free,
            "conversion needs under 1 GB, but loading is slow where files do not stay in memory: stop other programs",
        )  # fmt: skip
    else:
        yield Finding("good", "memory", free)
    yield from _shared_memory(facts)
    if host.disk is not None:
        yield _disk(host.disk)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    remedy = "mount a memory file system there; in a container: --shm-size 1g"
    if host.shm is None or host.shm_free is None:
        yield Finding("broken", "/dev/shm", "there is none, and two ranks meet in it", remedy)
    elif host.shm_free < _SHM:
        yield Finding(
            "broken",
            "/dev/shm",
            f"{host.shm_free / 1e6:.0f} of {host.shm / 1e6:.0f} MB free, two ranks need 64",
            remedy,
        )
    else:
        yield Finding("good", "/dev/shm", f"{host.shm_free / 1e6:.0f} of {host.shm / 1e6:.0f} MB free")
    if host.remove_ipc:
        yield Finding(
            "good",
            "RemoveIPC",
            "is on: systemd removes shared memory at a user's last logout; duovolt's has no name by then",
        )


def _disk(disk: Disk) -> Finding:
    if disk.fault is not None:
        return Finding(
            "broken", "disk", f"the folder cannot be measured ({disk.fault})", "give one that can be written"
        )
    text = (
        f"writes {disk.write / 1e6:.0f} MB/s, reads {disk.read / 1e6:.0f} MB/s ({disk.nbytes / 1e6:.0f} MB), "
        f"{disk.free / 1e9:.0f} GB free"
    )
    if min(disk.write, disk.read) < _SLOW_DISK:
        return Finding(
            "limited", "disk", text,
            f"the 27B's 25 GB take {25e9 / max(1.0, disk.read) / 60:.0f} minutes to load when they are not in memory",
        )  # fmt: skip
    return Finding("good", "disk", text)
