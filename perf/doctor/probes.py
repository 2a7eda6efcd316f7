"""The real probes: the driver's library, torch, NVRTC, the bus, /proc."""

import os
import platform
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ...checkpoint.errors import EnvironmentFault
from ...kernels.build import PREBUILT_VARIABLE, compiler_version, reaches
from ...kernels.libraries import driver_version, nccl_arches
from . import children
from .disk import measure_disk
from .facts import Card, Host, Link, Load, Software
from .nvml import Nvml

DRIVER_SECONDS = 60.0  # a card that wakes up takes a few
Result = TypeVar("Result")
_PCI = Path("/sys/bus/pci/devices")
_SHM = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_LOGIND = (Path("/etc/systemd/logind.conf"), Path("/etc/systemd/logind.conf.d"))
_SYSTEMD = Path("/run/systemd/system")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_VOLTA = "compute_70"


class MachineProbes:
    """Probes of this machine."""

    def __init__(self, seconds: float = DRIVER_SECONDS) -> None:
        self._seconds = seconds
        self._nvml: Nvml | None = None

    def cards(self) -> tuple[list[Card], str | None]:
        """Asked in a thread of its own that is left behind if the driver hangs."""
        try:
            return within(self._seconds, self._ask)
        except TimeoutError:
            return [], f"the driver gives no answer within {self._seconds:g} s: see `dmesg`, and restart"

    def _ask(self) -> tuple[list[Card], str | None]:
        library = Nvml()
        cards = library.cards() or _torch_cards()
        self._nvml = library
        return cards, None if cards else library.reason

    def software(self) -> Software:
        return Software(
            python=platform.python_version(),
            torch=str(torch.__version__),
            torch_cuda=torch.version.cuda,
            torch_arches=torch_arches(),
            driver=driver_version() or (self._nvml.driver() if self._nvml else None),
            **_nvrtc(),  # type: ignore[arg-type]
            nccl=_nccl_version(),
            nccl_arches=nccl_arches(),
            prebuilt=bool(os.environ.get(PREBUILT_VARIABLE)),
        )

    def host(self, folder: Path | None) -> Host:
        memory = _meminfo(_MEMINFO)
        shm, shm_free = _room(_SHM)
        return Host(
            cores=len(os.sched_getaffinity(0)),
            memory=memory.get("MemTotal", 0),
            memory_available=memory.get("MemAvailable", 0),
            shm=shm,
            shm_free=shm_free,
            remove_ipc=remove_ipc(_LOGIND) if _SYSTEMD.is_dir() else None,
            pci_cards=nvidia_on_bus(_PCI),
            disk=None if folder is None else measure_disk(folder),
        )

    def link(self, first: Card, second: Card) -> Link:
        return children.link(first, second)

    def load(self, cards: list[Card], seconds: float, tell: Callable[[float], None] = lambda passed: None) -> Load:
        sample = self._nvml.sample if self._nvml else lambda card, passed: None
        return children.load(cards, seconds, sample, tell)


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """Its result. Raises TimeoutError if there is none in time: the thread then goes on by itself, and dies with the process."""
    found: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(function())
        except Exception as error:  # raised where the answer is waited for
            found.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def torch_arches() -> list[str]:
    """What torch was built for, whether or not a driver answers."""
    flags = getattr(torch._C, "_cuda_getArchFlags", None)  # get_arch_list() is empty without a card
    found = (flags() or "").split() if flags is not None else torch.cuda.get_arch_list()
    return sorted(found, key=lambda name: (len(name.rpartition("_")[2]), name))


def nvidia_on_bus(root: Path) -> tuple[str, ...]:
    """vendor:device of NVIDIA's display devices, whether or not a driver has them."""
    found = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                found.append(f"{vendor[2:]}:{(device / 'device').read_text().strip()[2:]}")
        except OSError:
            continue
    return tuple(found)


def remove_ipc(places: tuple[Path, ...]) -> bool:
    """systemd's RemoveIPC, on unless a file says no; the last word counts."""
    on = True
    for place in places:
        for path in sorted(place.glob("*.conf")) if place.is_dir() else [place]:
            try:
                lines = path.read_text(errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, value = line.partition("=")
                if name.strip() == "RemoveIPC":
                    on = value.strip().lower() not in ("no", "false", "0", "off")
    return on


def _torch_cards() -> list[Card]:
    """Cards as torch sees them, where the driver's library does not answer."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(index)
        capability = (told.major, told.minor)
        found.append(
            Card(
                index,
                told.name,
                capability=capability,
                multiprocessors=told.multi_processor_count,
                memory=told.total_memory,
            )
        )
    return found


def _nvrtc() -> dict[str, object]:
    try:
        return {"nvrtc": compiler_version(), "nvrtc_reaches_volta": reaches(_VOLTA)}
    except EnvironmentFault as fault:
        return {"nvrtc_fault": str(fault)}


def _nccl_version() -> tuple[int, ...] | None:
    if torch.version.cuda is None:
        return None
    try:
        return tuple(torch.cuda.nccl.version())  # type: ignore[arg-type]
    except (AttributeError, RuntimeError, TypeError):  # a build without it
        return None


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _room(path: Path) -> tuple[int | None, int | None]:
    try:
        told = os.statvfs(path)
    except OSError:
        return None, None
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
