"""NVIDIA's run-time compiler NVRTC through ctypes: which library is loaded, and CUDA C++ text to PTX or a cubin.

The bindings of a CUDA version load that version's compiler alone. A V100 needs one of CUDA 12, whatever CUDA torch brings,
so the wheel `nvidia-cuda-nvrtc-cu12` comes first. Signatures: nvrtc.h, the same in CUDA 12 and 13.
"""

import ctypes
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..checkpoint.errors import EnvironmentFault

INSTALL = 'pip install "duovolt[cuda]"'
WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")  # the first of these that is installed
SONAMES = ("libnvrtc.so.12", "libnvrtc.so.13")  # what a toolkit of the system is asked for
_LIBRARY = re.compile(r"libnvrtc\.so\.\d+")
_FUNCTIONS = {  # arguments; each gives a status but the last
    "nvrtcVersion": [ctypes.POINTER(ctypes.c_int)] * 2,
    "nvrtcGetNumSupportedArchs": [ctypes.POINTER(ctypes.c_int)],
    "nvrtcGetSupportedArchs": [ctypes.POINTER(ctypes.c_int)],
    "nvrtcCreateProgram": [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int,
        ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_char_p),
    ],
    "nvrtcDestroyProgram": [ctypes.POINTER(ctypes.c_void_p)],
    "nvrtcCompileProgram": [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    **{f"nvrtcGet{what}Size": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)] for what in ("PTX", "CUBIN", "ProgramLog")},
    **{f"nvrtcGet{what}": [ctypes.c_void_p, ctypes.c_char_p] for what in ("PTX", "CUBIN", "ProgramLog")},
    "nvrtcGetErrorString": [ctypes.c_int],
}  # fmt: skip


class CompileError(Exception):
    """The source does not compile; the text is the compiler's log."""


class Compiler:
    """A loaded NVRTC. `path`: as it was loaded; `version`, for example (12, 9); `architectures`: numbers, ascending."""

    def __init__(self, path: str) -> None:
        """Raises OSError if `path` cannot be loaded, AttributeError if it is another library."""
        self.path = path
        self._library = ctypes.CDLL(path)
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", major, minor)
        self.version = major.value, minor.value
        self._load_builtins()
        self._call("nvrtcGetNumSupportedArchs", count)
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = sorted(numbers)

    def compile(
        self, name: str, text: bytes, headers: Mapping[str, bytes], options: Sequence[str], result: str
    ) -> bytes:
        """`text` under the file name `name`, which may include `headers` by their names, to `result`: `PTX` or `CUBIN`.

        PTX comes without a final NUL. Raises CompileError with the compiler's words, EnvironmentFault if it fails itself.
        """
        program = ctypes.c_void_p()
        names = _strings([header.encode() for header in headers])
        self._call(
            "nvrtcCreateProgram", program, text, name.encode(), len(headers), _strings(list(headers.values())), names
        )
        try:
            encoded = _strings([option.encode() for option in options])
            if self._library.nvrtcCompileProgram(program, len(options), encoded):
                raise CompileError(self._fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0\n "))
            image = self._fetch(program, result)
            return image.rstrip(b"\0") if result == "PTX" else image
        finally:
            self._library.nvrtcDestroyProgram(program)

    def _load_builtins(self) -> None:
        """The part that NVRTC opens by name when it compiles: its wheel for CUDA 13 does not say that it lies beside it."""
        beside = Path(self.path).with_name("libnvrtc-builtins.so.{}.{}".format(*self.version))
        if beside.is_absolute() and beside.is_file():
            self._builtins = ctypes.CDLL(str(beside))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, size)
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise EnvironmentFault(f"{function} of {self.path} failed: {reason}.")


@functools.cache
def load() -> Compiler:
    """The compiler of this process: the wheel for CUDA 12, one for another CUDA, or a toolkit's.

    Raises EnvironmentFault if there is none, with what the first place that has one said.
    """
    faults = []
    for path in _places():
        try:
            return Compiler(path)
        except OSError as error:
            faults.append(str(error).strip().partition("\n")[0])
        except AttributeError as error:
            faults.append(f"{path} is no NVRTC: {error}")
    raise EnvironmentFault(f"the CUDA compiler library NVRTC is missing ({faults[0]}). Install it: {INSTALL}")


def _places() -> Iterator[str]:
    """What to load, best first: files of installed wheels, then names and paths as the loader and NVIDIA's finder see them."""
    for wheel in WHEELS:
        yield from map(str, installed(wheel))
    yield from SONAMES
    if found := _found_by_nvidia():
        yield found


def installed(wheel: str) -> list[Path]:
    """The NVRTC that an installed distribution lists among its files; empty if it is not installed or lists none."""
    try:
        files = metadata.distribution(wheel).files or []
    except metadata.PackageNotFoundError:
        return []
    paths = [Path(str(file.locate())) for file in files if _LIBRARY.fullmatch(file.name)]
    return [path for path in paths if path.is_file()]


def _found_by_nvidia() -> str | None:
    """Where NVIDIA's own finder, which comes with the driver's bindings, sees one: a conda environment, a toolkit."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError, OSError):  # its errors are RuntimeErrors
        return None


def _strings(texts: Sequence[bytes]) -> Any:
    return (ctypes.c_char_p * len(texts))(*texts)
