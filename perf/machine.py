"""What a figure was measured on: card, clocks, driver, versions. No names of hosts, serial numbers or paths.

Facts come from the driver through `cuda.bindings`, so that they need nothing but duovolt[cuda].
"""

import datetime
from typing import Any

import msgspec
import torch

from .. import __version__
from ..checkpoint.errors import EnvironmentFault
from ..kernels.libraries import driver_version


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One card and the software that drove it. Clocks: the highest of the card, in MHz; None where it was not told."""

    card: str
    capability: tuple[int, int]
    multiprocessors: int
    core_mhz: int
    memory_mhz: int
    bus_bits: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None
    torch: str
    cuda: str | None
    duovolt: str
    date: str

    @property
    def peak_gbps(self) -> float:
        """Bandwidth on paper in GB/s: two transfers a clock over the whole bus, 0 where the driver does not tell."""
        return 2 * self.memory_mhz * 1e6 * self.bus_bits / 8 / 1e9

    @property
    def named(self) -> str:
        """What a table says that it is of."""
        clock = f", memory at {self.memory_mhz} MHz" if self.memory_mhz else ""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.card}{clock}{driver}, torch {self.torch}, duovolt {self.duovolt}, {self.date}"


def read_machine(device: torch.device) -> Machine:
    """Facts of a CUDA device. Raises EnvironmentFault if the driver's bindings are missing."""
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Machine(
        card=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        core_mhz=_attribute(index, "CLOCK_RATE") // 1000,
        memory_mhz=_attribute(index, "MEMORY_CLOCK_RATE") // 1000,
        bus_bits=_attribute(index, "GLOBAL_MEMORY_BUS_WIDTH"),
        l2_bytes=_attribute(index, "L2_CACHE_SIZE"),
        memory_bytes=properties.total_memory,
        driver=driver_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        duovolt=__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def facts_of(device: torch.device) -> dict[str, str]:
    """What a table of exchanges says of a card, as words. Raises as `read_machine`."""
    machine = read_machine(device)
    clock = f", memory at {machine.memory_mhz} MHz" if machine.memory_mhz else ""
    return {"card": machine.card + clock, "driver": str(machine.driver), "torch": machine.torch}


def machine_of(device: torch.device) -> Machine:
    """Facts of a device; of one without a card only what a figure of a trial needs. Raises as `read_machine`."""
    if device.type == "cuda":
        return read_machine(device)
    return Machine(
        card="none: references on the CPU", capability=(0, 0), multiprocessors=0, core_mhz=0, memory_mhz=0, bus_bits=0,
        l2_bytes=0, memory_bytes=0, driver=None, torch=str(torch.__version__), cuda=None, duovolt=__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )  # fmt: skip


def _attribute(index: int, name: str) -> int:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise EnvironmentFault('the CUDA driver bindings are missing: pip install "duovolt[cuda]"') from None
    attribute: Any = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    torch.cuda.current_stream(index)  # the driver is initialised
    status, handle = driver.cuDeviceGet(index)
    if int(status) == 0:
        status, value = driver.cuDeviceGetAttribute(attribute, handle)
        if int(status) == 0:
            return int(value)
    return 0
