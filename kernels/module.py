"""A compiled CUDA source on a device: loading through the driver, and launching on torch's current stream."""

import ctypes
import functools
from types import ModuleType
from typing import Any

import torch

from ..checkpoint.errors import EnvironmentFault
from .build import INSTALL, OLDEST, image_for

Argument = torch.Tensor | int | None  # a pointer, a 32-bit integer, the null pointer


def arch_for(capability: tuple[int, int]) -> str:
    """What a card of a compute capability loads: the sm_70 cubin on a V100, compute_70 PTX on a newer card.

    Raises EnvironmentFault for an older card.
    """
    number = 10 * capability[0] + capability[1]
    if number < OLDEST:
        raise EnvironmentFault(
            f"a GPU of compute capability {capability[0]}.{capability[1]} is too old: duovolt's kernels need 7.0 (V100)."
        )
    return "sm_70" if number == OLDEST else "compute_70"


class Module:
    """The kernels of one source on one device, loaded into the context that torch uses."""

    def __init__(self, source: str, device: int) -> None:
        """Compile or take from the cache, then load. Raises EnvironmentFault if compiler, driver or card cannot."""
        self._driver = _driver()
        arch = arch_for(torch.cuda.get_device_capability(device))
        image = image_for(source, arch)
        if not arch.startswith("sm_"):
            image += b"\0"  # the driver takes PTX as a C string
        self._call("cuInit", 0)
        self._device = device
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._module = self._call("cuModuleLoadData", image, what=f"loading {source} ({arch})")
        finally:
            self._call("cuCtxPopCurrent")
        self._functions: dict[str, Any] = {}

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[Argument, ...]) -> None:
        """Start kernel `name` on torch's current stream of the device; tensors must stay alive until it has run.

        Raises EnvironmentFault if the driver refuses.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        values = tuple(item.data_ptr() if isinstance(item, torch.Tensor) else item or 0 for item in arguments)
        types = tuple(ctypes.c_int if isinstance(item, int) else ctypes.c_void_p for item in arguments)
        # The thread's current context may be another device's, and torch's own notion of it must not change.
        self._call("cuCtxPushCurrent", self._context)
        try:
            if name not in self._functions:
                self._functions[name] = self._call("cuModuleGetFunction", self._module, name.encode())
            self._call(
                "cuLaunchKernel",
                *(self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0),
                what=f"launching {name}",
            )
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        status, *values = getattr(self._driver, function)(*arguments)
        if int(status) != 0:
            _, name = self._driver.cuGetErrorName(status)
            _, text = self._driver.cuGetErrorString(status)
            reason = f"{text.decode()} ({name.decode()})" if text and name else f"error {int(status)}"
            raise EnvironmentFault(f"{what or function} failed on GPU {self._device_name()}: {reason}.")
        return values[0] if values else None

    def _device_name(self) -> str:
        return str(getattr(self, "_device", "?"))


@functools.cache
def load(source: str, device: int) -> Module:
    """The module of a source on a device, loaded once a process. Call it before a graph capture begins."""
    return Module(source, device)


@functools.cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(f"the CUDA driver bindings are missing ({error}). Install them: {INSTALL}") from None
    return driver
