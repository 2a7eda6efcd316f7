"""A compiled CUDA source on a device: loading through the driver, and launching on torch's current stream."""

import contextlib
import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from ..checkpoint.errors import EnvironmentFault, InputError
from .build import OLDEST, image_for
from .launching import Parameters, current_context, current_stream, starter
from .nvrtc import INSTALL

Argument = (
    torch.Tensor | int | float | ctypes.Structure | ctypes.c_void_p | None
)  # pointer, int32, float32, struct by value, address, null pointer
Grid = int | tuple[int, int] | tuple[int, int, int]
PORTABLE = "compute_70"
OVERLAPPING = 90  # the first architecture on which a launch may begin before the one before it has ended
CLUSTERS = 90  # and on which blocks reach each other's shared memory
_forced_arch: ContextVar[str | None] = ContextVar("forced_arch", default=None)
_overlapping: ContextVar[bool] = ContextVar("overlapping", default=False)
_launches: ContextVar[Counter[str] | None] = ContextVar("launches", default=None)


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


def overlaps(arch: str) -> bool:
    """Whether launches of code for `arch` may begin before the one before has ended."""
    return arch.startswith("sm_") and int(arch[3:]) >= OVERLAPPING


@contextlib.contextmanager
def forced_arch(arch: str) -> Iterator[None]:
    """Within it, `load` gives modules of this architecture: `PORTABLE` runs on a newer card what a V100 runs."""
    token = _forced_arch.set(arch)
    try:
        yield
    finally:
        _forced_arch.reset(token)


@contextlib.contextmanager
def overlapping(wanted: bool = True) -> Iterator[None]:
    """Within it, launches that can begin before the one before has ended do so (the same bits, sooner); else none does.

    Meant for work that is captured: such a launch takes the host longer.
    """
    token = _overlapping.set(wanted)
    try:
        yield
    finally:
        _overlapping.reset(token)


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Launches of this thread within it, by the architecture whose code ran: what was run, not what was asked for."""
    found: Counter[str] = Counter()
    token = _launches.set(found)
    try:
        yield found
    finally:
        _launches.reset(token)


class Module:
    """The kernels of one source on one device, loaded into the context that torch uses.

    arch      what was loaded
    overlaps  whether launches of it may begin before the one before has ended
    clusters  whether its blocks may reach each other's shared memory
    """

    def __init__(self, source: str, device: int, arches: list[str], defines: tuple[str, ...] = ()) -> None:
        """Load the first of `arches` that can be had. Raises EnvironmentFault if compiler, driver or card cannot."""
        self._driver = driver()
        self._device = device
        self.arch, image = _first_image(source, arches, defines)
        if not self.arch.startswith("sm_"):
            image += b"\0"  # the driver takes PTX as a C string
        self._call("cuInit", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._module = self._call("cuModuleLoadData", image, what=f"loading {source} ({self.arch})")
        finally:
            self._call("cuCtxPopCurrent")
        self._handle = int(self._context)
        self._functions: dict[str, Any] = {}
        self._starts: dict[str, int] = {}  # the same as plain numbers
        self._shared: dict[str, int] = {}
        self._raising = threading.Lock()
        self._configs: dict[tuple[int, ...], Any] = {}
        self.clusters = self.arch.startswith("sm_") and int(self.arch[3:]) >= CLUSTERS
        self.overlaps = overlaps(self.arch)

    def launch(
        self,
        name: str,
        blocks: Grid,
        threads: int,
        arguments: tuple[Argument, ...],
        shared_bytes: int = 0,
        overlap: bool = False,
        cluster: int = 1,
    ) -> None:
        """Start kernel `name` on torch's current stream of the device; tensors must stay alive until it has run.

        `shared_bytes`: dynamic shared memory a block, above 48 KB too. `overlap`: within `overlapping`, where card and code can,
        it begins before the launch before it has ended; the kernel must call `await_previous` on every way to its end.
        `cluster`: so many blocks in a row run at once, where the code can (`clusters`).
        Raises EnvironmentFault if the driver refuses.
        """
        stream, parameters = current_stream(self._device), Parameters(arguments)
        grid = (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1)[:3]
        # The thread's current context may be another device's, and torch's own notion of it must not change.
        elsewhere = current_context() != self._handle
        if elsewhere:
            self._call("cuCtxPushCurrent", self._context)
        try:
            overlap = overlap and self.overlapping
            if overlap or cluster > 1:
                config = self._configured(grid, threads, shared_bytes, overlap, cluster, stream)
                function = self._function(name, shared_bytes)
                self._call("cuLaunchKernelEx", config, function, parameters.address, 0, what=f"launching {name}")
            else:
                start = self._starts.get(name, 0)
                if not start or shared_bytes > self._shared.get(name, 0):
                    start = self._starts[name] = int(self._function(name, shared_bytes))
                where = (*grid, threads, 1, 1, shared_bytes, stream)
                if status := starter()(start, *where, parameters.address, None):
                    self._check(self._driver.CUresult(status), f"launching {name}")
            if (counter := _launches.get()) is not None:
                counter[self.arch] += 1
        finally:
            if elsewhere:
                self._call("cuCtxPopCurrent")

    @property
    def overlapping(self) -> bool:
        """Whether a launch with `overlap` begins before the one before it has ended."""
        return self.overlaps and _overlapping.get()

    def attribute(self, name: str, attribute: str) -> int:
        """A `CUfunction_attribute` of kernel `name`, for example NUM_REGS or SHARED_SIZE_BYTES."""
        wanted = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        self._call("cuCtxPushCurrent", self._context)
        try:
            return int(self._call("cuFuncGetAttribute", wanted, self._function(name, 0)))
        finally:
            self._call("cuCtxPopCurrent")

    def _configured(
        self, grid: tuple[int, ...], threads: int, shared_bytes: int, overlap: bool, cluster: int, stream: int
    ) -> Any:
        """A launch that may begin before its predecessor on the stream has ended, or whose blocks run in clusters; kept, for
        making one takes its time. Never changed once it is kept: another thread may be launching with it."""
        key = (*grid, threads, shared_bytes, overlap, cluster, stream)
        if key not in self._configs:
            config = self._driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = stream
            config.attrs = self._attributes(overlap, cluster)
            config.numAttrs = len(config.attrs)
            self._configs[key] = config
        return self._configs[key]

    def _attributes(self, overlap: bool, cluster: int) -> list[Any]:
        names, made = self._driver.CUlaunchAttributeID, []
        if overlap:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            made.append(attribute)
        if cluster > 1:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            made.append(attribute)
        return made

    def _function(self, name: str, shared_bytes: int) -> Any:
        if name not in self._functions:
            self._functions[name] = self._call("cuModuleGetFunction", self._module, name.encode())
        function = self._functions[name]
        if shared_bytes > self._shared.get(name, 0):  # static and dynamic memory share the 48 KB that need no asking
            limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with self._raising:  # else another thread's smaller one might come last
                if shared_bytes > self._shared.get(name, 0):
                    self._call("cuFuncSetAttribute", function, limit, shared_bytes, what=f"shared memory of {name}")
                    self._shared[name] = shared_bytes
        return function

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        status, *values = getattr(self._driver, function)(*arguments)
        self._check(status, what or function)
        return values[0] if values else None

    def _check(self, status: Any, what: str) -> None:
        if int(status) != 0:
            _, name = self._driver.cuGetErrorName(status)
            _, text = self._driver.cuGetErrorString(status)
            reason = f"{text.decode()} ({name.decode()})" if text and name else f"error {int(status)}"
            raise EnvironmentFault(f"{what} failed on GPU {self._device}: {reason}.")


def load(source: str, device: int, defines: tuple[str, ...] = ()) -> Module:
    """The module of a source on a device, loaded once a process. Call it before a graph capture begins.

    Raises EnvironmentFault if it cannot be compiled, loaded, or the card is too old.
    """
    arch = _forced_arch.get()
    return _loaded(source, device, _arches_of(device) if arch is None else (arch,), defines)


@functools.cache
def _arches_of(device: int) -> tuple[str, ...]:
    return tuple(arches_for(torch.cuda.get_device_capability(device)))


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


@functools.cache
def driver() -> ModuleType:
    """The bindings of the CUDA driver. Raises EnvironmentFault if they are missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(f"the CUDA driver bindings are missing ({error}). Install them: {INSTALL}") from None
    return driver


@functools.cache
def block_shared_bytes(device: int) -> int:
    """Shared memory in bytes that a block of a CUDA device may ask for. Raises EnvironmentFault if the driver refuses."""
    return _shared_bytes(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")


@functools.cache
def multiprocessor_shared_bytes(device: int) -> int:
    """Shared memory in bytes of a multiprocessor, for all its blocks. Raises EnvironmentFault if the driver refuses."""
    return _shared_bytes(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")


def _shared_bytes(device: int, attribute: str) -> int:
    bindings = driver()
    wanted = getattr(bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
    status, number = bindings.cuDeviceGet(device)
    if int(status) == 0:
        status, found = bindings.cuDeviceGetAttribute(wanted, number)
    if int(status) != 0:
        raise EnvironmentFault(f"asking GPU {device} for its shared memory failed: error {int(status)}.")
    return int(found)
