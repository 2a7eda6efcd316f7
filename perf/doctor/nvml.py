"""Cards as the driver's own library tells of them; every question may go unanswered."""

import os
from pathlib import Path
from typing import Any

from .facts import Card, Sample

_MISSING = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
_PCI = Path("/sys/bus/pci/devices")
_MOST_LINKS = 18
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}  # of a multiprocessor; 128 for all newer ones
_SLOWED = {
    0x04: "its power limit",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "the power supply",
}


class Nvml:
    """The library, open. `reason`: why it, or any card, is not there."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: dict[int, Any] = {}
        self.reason: str | None = None
        try:
            import pynvml
        except ImportError:
            self.reason = _MISSING
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.reason = f"the NVIDIA driver does not answer ({error})"
            return
        self._library = pynvml

    def cards(self) -> list[Card]:
        """Those that CUDA_VISIBLE_DEVICES leaves, in the driver's order."""
        if self._library is None:
            return []
        count = self._ask("nvmlDeviceGetCount")
        found = []
        for index in range(count or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None and is_visible(index, _text(self._ask("nvmlDeviceGetUUID", handle))):
                self._handles[index] = handle
                found.append(self._card(index, handle))
        if not found:
            self.reason = "the driver sees no card" if not count else "CUDA_VISIBLE_DEVICES leaves none"
        return found

    def driver(self) -> str | None:
        """Its version."""
        return None if self._library is None else _text(self._ask("nvmlSystemGetDriverVersion"))

    def sample(self, card: Card, seconds: float) -> Sample | None:
        """The card as it is now."""
        handle = self._handles.get(card.index)
        if handle is None:
            return None
        nvml = self._library
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        return Sample(
            seconds=seconds,
            clock=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            temperature=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            slowed=tuple(name for bit, name in _SLOWED.items() if reasons & bit),
            pcie=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        )

    def _card(self, index: int, handle: Any) -> Card:
        nvml, ask = self._library, self._ask
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        cores = ask("nvmlDeviceGetNumGpuCores", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        address = _sysfs_address(_text(getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", None)))
        limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return Card(
            index=index,
            name=_text(ask("nvmlDeviceGetName", handle)) or "a card without a name",
            pci=address,
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            multiprocessors=None if not cores or capability is None else cores // _CORES.get(tuple(capability), 128),
            memory=None if memory is None else int(memory.total),
            memory_free=None if memory is None else int(memory.free),
            core_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
            memory_mhz_application=ask("nvmlDeviceGetApplicationsClock", handle, nvml.NVML_CLOCK_MEM),
            bus_bits=ask("nvmlDeviceGetMemoryBusWidth", handle),
            pcie=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_most=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            lanes=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            lanes_most=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            nvlinks=sum(ask("nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(_MOST_LINKS)),
            temperature=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_temperature=ask(
                "nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            power_limit=None if limit is None else limit / 1000,
            retired=self._retired(handle),
            uncorrected=ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_AGGREGATE_ECC,
            ),
            processes=None if processes is None else len(processes),
            iommu=iommu_type(address),
        )

    def _retired(self, handle: Any) -> int | None:
        nvml = self._library
        causes = (
            nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
        lists = [self._ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in causes]
        told = [pages for pages in lists if pages is not None]
        return sum(len(pages) for pages in told) if told else None

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, name)(*arguments)
        except (self._library.NVMLError, AttributeError, TypeError):  # a driver or library that lacks the question
            return None


def is_visible(index: int, uuid: str | None, wanted: str | None = None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, or `wanted` in its place, leaves a card."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") if wanted is None else wanted
    if listed is None:
        return True
    names = [name.strip() for name in listed.split(",")]
    return str(index) in names or (uuid is not None and any(name and uuid.startswith(name) for name in names))


def iommu_type(address: str, root: Path = _PCI) -> str | None:
    """Type of the IOMMU group of a device on the bus; None without one."""
    try:
        return (root / address / "iommu_group" / "type").read_text().strip() or None
    except OSError:
        return None


def _sysfs_address(bus: str | None) -> str:
    """0000:3b:00.0 of 00000000:3B:00.0."""
    if not bus:
        return ""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
