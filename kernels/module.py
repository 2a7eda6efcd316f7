"""A compiled CUDA source on a device: loading through the driver, and launching on torch's current stream."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from ..checkpoint.errors import EnvironmentFault, InputError
from .build import INSTALL, OLDEST, image_for

Argument = (
    torch.Tensor | int | float | ctypes.Structure | None
)  # pointer, int32, float32, struct by value, null pointer
Grid = int | tuple[int, int] | tuple[int, int, int]
PORTABLE = "compute_70"
EARLIEST = 90  # compute capability, times ten, from which kernels may start early
IN_TURN = "DUOVOLT_IN_TURN"  # set to anything, each kernel starts when the one before it has ended
_forced_arch: ContextVar[str | None] = ContextVar("forced_arch", default=None)


def arches_for(capability: tuple[int, int]) -> list[str]:
    """What a card of a compute capability can load, best first: its own machine code, then compute_70 PTX.

    A V100 has machine code only: PTX of a recent compiler may need a newer driver than the last one that drives it.
    Raises EnvironmentFault for an older card.
    """
    number = 10 * capability[0] + capability[1]
    if number < OLDEST:
        raise EnvironmentFault(
            f"a GPU of compute capability {capability[0]}.{capability[1]} is too old: duovolt's kernels need 7.0 (V100)."
        )
    return ["sm_70"] if number == OLDEST else [f"sm_{number}", PORTABLE]


@contextlib.contextmanager
def forced_arch(arch: str) -> Iterator[None]:
    """Within it, `load` gives modules of this architecture: `PORTABLE` runs on a newer card what a V100 runs."""
    token = _forced_arch.set(arch)
    try:
        yield
    finally:
        _forced_arch.reset(token)


class Module:
    """The kernels of one source on one device, loaded into the context that torch uses. `arch`: what was loaded."""

    def __init__(self, source: str, device: int, arches: list[str], defines: tuple[str, ...] = ()) -> None:
        """Load the first of `arches` that can be had. Raises EnvironmentFault if compiler, driver or card cannot."""
        self._driver = driver()
        self._device = device
        self.arch, image = _first_image(source, arches, defines)
        native = self.arch.startswith("sm_")
        self._starts_early = native and int(self.arch[3:].rstrip("af")) >= EARLIEST and not os.environ.get(IN_TURN)
        if not native:
            image += b"\0"  # the driver takes PTX as a C string
        self._call("cuInit", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._module = self._call("cuModuleLoadData", image, what=f"loading {source} ({self.arch})")
        finally:
            self._call("cuCtxPopCurrent")
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def launch(
        self,
        name: str,
        blocks: Grid,
        threads: int,
        arguments: tuple[Argument, ...],
        shared_bytes: int = 0,
        *,
        early: bool = False,
    ) -> None:
        """Start kernel `name` on torch's current stream of the device; tensors must stay alive until it has run.

        `shared_bytes`: dynamic shared memory a block, above 48 KB too. `early`: it may start while the kernel before it in
        the stream still runs, for it waits by itself (csrc/early.cuh), where the card can do so. Raises EnvironmentFault if
        the driver refuses.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        values = [_as_ctypes(item) for item in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1)[:3]
        # The thread's current context may be another device's, and torch's own notion of it must not change.
        self._call("cuCtxPushCurrent", self._context)
        try:
            function = self._function(name, shared_bytes)
            if early and self._starts_early:
                where = self._early(grid, threads, shared_bytes, stream)
                self._call("cuLaunchKernelEx", where, function, ctypes.addressof(pointers), 0, what=f"launching {name}")
            else:
                plain = (*grid, threads, 1, 1, shared_bytes, stream)
                self._call("cuLaunchKernel", function, *plain, ctypes.addressof(pointers), 0, what=f"launching {name}")
        finally:
            self._call("cuCtxPopCurrent")

    def _early(self, grid: tuple[int, ...], threads: int, shared_bytes: int, stream: int) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        where = self._driver.CUlaunchConfig()
        where.gridDimX, where.gridDimY, where.gridDimZ = grid
        where.blockDimX, where.blockDimY, where.blockDimZ = threads, 1, 1
        where.sharedMemBytes, where.hStream = shared_bytes, stream
        where.attrs, where.numAttrs = [attribute], 1
        return where

    def attribute(self, name: str, attribute: str) -> int:
        """A `CUfunction_attribute` of kernel `name`, for example NUM_REGS or SHARED_SIZE_BYTES."""
        wanted = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        self._call("cuCtxPushCurrent", self._context)
        try:
            return int(self._call("cuFuncGetAttribute", wanted, self._function(name, 0)))
        finally:
            self._call("cuCtxPopCurrent")

    def _function(self, name: str, shared_bytes: int) -> Any:
        if name not in self._functions:
            self._functions[name] = self._call("cuModuleGetFunction", self._module, name.encode())
        function = self._functions[name]
        if shared_bytes > self._shared.get(name, 0):  # static and dynamic memory share the 48 KB that need no asking
            limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, limit, shared_bytes, what=f"shared memory of {name}")
            self._shared[name] = shared_bytes
        return function

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        status, *values = getattr(self._driver, function)(*arguments)
        if int(status) != 0:
            _, name = self._driver.cuGetErrorName(status)
            _, text = self._driver.cuGetErrorString(status)
            reason = f"{text.decode()} ({name.decode()})" if text and name else f"error {int(status)}"
            raise EnvironmentFault(f"{what or function} failed on GPU {self._device}: {reason}.")
        return values[0] if values else None


def load(source: str, device: int, defines: tuple[str, ...] = ()) -> Module:
    """The module of a source on a device, loaded once a process. Call it before a graph capture begins.

    Raises EnvironmentFault if it cannot be compiled, loaded, or the card is too old.
    """
    arch = _forced_arch.get()
    arches = arches_for(torch.cuda.get_device_capability(device)) if arch is None else [arch]
    return _loaded(source, device, tuple(arches), defines)


@functools.cache
def _loaded(source: str, device: int, arches: tuple[str, ...], defines: tuple[str, ...]) -> Module:
    return Module(source, device, list(arches), defines)


def _first_image(source: str, arches: list[str], defines: tuple[str, ...]) -> tuple[str, bytes]:
    faults = []
    for arch in arches:
        try:
            return arch, image_for(source, arch, defines)
        except (EnvironmentFault, InputError) as fault:  # InputError: an architecture younger than the compiler
            faults.append(str(fault))
    raise EnvironmentFault(" ".join(dict.fromkeys(faults)))


def _as_ctypes(item: Argument) -> Any:
    if isinstance(item, torch.Tensor):
        return ctypes.c_void_p(item.data_ptr())
    if isinstance(item, float):
        return ctypes.c_float(item)
    if isinstance(item, int):
        return ctypes.c_int(item)
    return ctypes.c_void_p(None) if item is None else item


@functools.cache
def driver() -> ModuleType:
    """The bindings of the CUDA driver. Raises EnvironmentFault if they are missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(f"the CUDA driver bindings are missing ({error}). Install them: {INSTALL}") from None
    return driver
