"""Memory that two GPUs' processes share: a piece of the device given to a peer, a peer's piece, and pinned host memory.

Allocated with the driver and not with torch, whose pieces lie in blocks of their own: a handle names a whole block.
"""

from __future__ import annotations

import ctypes
import mmap
from types import ModuleType
from typing import Any

from ..checkpoint.errors import EnvironmentFault
from .module import driver

HANDLE_BYTES = 64


class _OnDevice:
    """Driver calls in the context that torch uses on a device."""

    def __init__(self, device: int) -> None:
        self._driver: ModuleType = driver()
        self.device = device
        self._call("cuInit", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))

    def _inside(self, function: str, *arguments: Any, what: str = "") -> Any:
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(function, *arguments, what=what)
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        status, *values = getattr(self._driver, function)(*arguments)
        if int(status) != 0:
            _, name = self._driver.cuGetErrorName(status)
            reason = name.decode() if name else f"error {int(status)}"
            raise EnvironmentFault(f"{what or function} failed on GPU {self.device}: {reason}.")
        return values[0] if values else None


class DeviceBlock(_OnDevice):
    """Zeroed bytes of device memory that a process of the same user can map. `address`, `handle` (64 bytes)."""

    def __init__(self, device: int, nbytes: int) -> None:
        """Raises EnvironmentFault if the memory or the handle cannot be had."""
        super().__init__(device)
        self.address = int(self._inside("cuMemAlloc", nbytes, what=f"allocating {nbytes} bytes"))
        try:
            self._inside("cuMemsetD8", self.address, 0, nbytes)
            handle = self._inside("cuIpcGetMemHandle", self.address, what="sharing memory between processes")
        except EnvironmentFault:
            self.close()
            raise
        self.handle = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Free it. The peer must have closed its mapping."""
        self._inside("cuMemFree", self.address)


class PeerBlock(_OnDevice):
    """Another process's DeviceBlock, mapped here with peer access. `address`."""

    def __init__(self, device: int, handle: bytes) -> None:
        """Raises EnvironmentFault if the driver does not map it: no peer access, or another container."""
        super().__init__(device)
        if len(handle) != HANDLE_BYTES:
            raise EnvironmentFault(f"the peer's memory handle has {len(handle)} bytes: expected {HANDLE_BYTES}.")
        wrapped = self._driver.CUipcMemHandle()
        ctypes.memmove(wrapped.getPtr(), handle, HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.address = int(
            self._inside(
                "cuIpcOpenMemHandle", wrapped, int(getattr(lazily, "value", lazily)), what="mapping the peer's memory"
            )
        )

    def put(self, source: int, nbytes: int, offset: int, stream: int) -> None:
        """Copy device memory from address `source` to `offset`, by the card's copy engine, on a stream."""
        self._inside("cuMemcpyDtoDAsync", self.address + offset, source, nbytes, stream, what="copying to the peer")

    def close(self) -> None:
        self._inside("cuIpcCloseMemHandle", self.address)


class PinnedBlock(_OnDevice):
    """A mapping of a memory-file-system file, locked and seen by the device. `address` is the device's."""

    def __init__(self, device: int, memory: mmap.mmap) -> None:
        """Raises EnvironmentFault if the driver refuses, as it does for files of a disk."""
        super().__init__(device)
        self._view = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._host = ctypes.addressof(self._view)
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._inside("cuMemHostRegister", self._host, len(memory), flags, what="pinning shared memory")
        self.address = int(self._inside("cuMemHostGetDevicePointer", self._host, 0))

    def close(self) -> None:
        """Unlock it; the mapping may then be closed."""
        self._inside("cuMemHostUnregister", self._host)
        del self._view


def peer_access(device: int, peer: int) -> bool:
    """What the driver says of direct access between two devices that this process sees. It proves nothing."""
    here = _OnDevice(device)
    return bool(here._call("cuDeviceCanAccessPeer", here._call("cuDeviceGet", device), here._call("cuDeviceGet", peer)))


def pci_address(device: int) -> str:
    """As sysfs names it: `0000:3b:00.0`."""
    here = _OnDevice(device)
    text = here._call("cuDeviceGetPCIBusId", 32, here._call("cuDeviceGet", device))
    return bytes(text).split(b"\0")[0].decode().lower()


def native_link(device: int, peer: int) -> bool:
    """True if atomics cross the link between two devices, as they do over NVLink and never over PCIe."""
    here = _OnDevice(device)
    wanted = here._driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(
        here._call(
            "cuDeviceGetP2PAttribute", wanted, here._call("cuDeviceGet", device), here._call("cuDeviceGet", peer)
        )
    )
