"""CUDA sources to PTX and machine code with NVRTC, and a cache of the results. Needs no GPU, driver or toolkit.

`sm_XY` gives machine code (a cubin) for one architecture, `compute_XY` PTX that a driver compiles for any newer card.
A V100 loads the sm_70 cubin. Another card loads machine code of its own, where the sources use what newer cards have,
or compute_70 PTX, which is what a V100 gets. An NVRTC of CUDA 12 reaches all of them, one of CUDA 13 all but Volta.

The cache is `$XDG_CACHE_HOME/duovolt/kernels`, keyed by sources, options and compiler version. If `DUOVOLT_KERNELS`
names a directory that `duovolt kernels build --out` filled, what is found there is not compiled.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..checkpoint import cache
from ..checkpoint.errors import EnvironmentFault, InputError
from . import nvrtc

CSRC = Path(__file__).parent / "csrc"
PREBUILT_VARIABLE = "DUOVOLT_KERNELS"
OLDEST = 70  # mma.m8n8k4 and the warp-synchronous instructions begin here
FIRST_WITHOUT_VOLTA = 13
_ARCH = re.compile(r"(sm|compute)_(\d{2,3})")
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Built:
    """A compiled source: `image` is PTX text or a cubin; `seconds` is what this call took; `path` its cache file."""

    source: str
    arch: str
    image: bytes
    seconds: float
    cached: bool
    path: Path


def sources() -> list[str]:
    """Names of the CUDA sources, one module each."""
    return sorted(path.name for path in CSRC.glob("*.cu"))


def options(arch: str, defines: tuple[str, ...] = ()) -> list[str]:
    """Compiler options for `sm_XY` or `compute_XY`, with preprocessor `defines` (`NAME` or `NAME=VALUE`).

    Raises InputError for any other name or an older architecture.
    """
    match = _ARCH.fullmatch(arch)
    if match is None or int(match[2]) < OLDEST:
        raise InputError(
            f"architecture {arch!r}: expected sm_XY (machine code) or compute_XY (PTX), XY at least {OLDEST}; "
            "a V100 is sm_70."
        )
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"--define-macro={define}" for define in defines)]


def file_name(source: str, arch: str, defines: tuple[str, ...] = ()) -> str:
    """Name under which `--out` stores a compiled source: it holds a digest of sources and options, no compiler version."""
    kind = "cubin" if arch.startswith("sm_") else "ptx"
    return f"{Path(source).stem}.{arch}.{_key(source, options(arch, defines))[:16]}.{kind}"


def build(source: str, arch: str, defines: tuple[str, ...] = ()) -> Built:
    """Compile one of `sources` for `arch` with `defines`, or take it from the cache.

    Raises InputError for an architecture that is misspelt or unknown to the compiler, EnvironmentFault if NVRTC is
    missing, cannot reach a V100, fails, or if the cache cannot be written.
    """
    begin = time.perf_counter()
    arguments = options(arch, defines)
    compiler = nvrtc.load()
    _check_target(compiler, arch)
    path = cache_directory() / f"{_key(source, [*arguments, *map(str, compiler.version)])}.bin"
    image = _read_cached(path)
    cached = image is not None
    if image is None:
        image = _compile(compiler, source, arch, arguments)
        write_atomically(path, xxhash.xxh3_128_digest(image) + image)
    return Built(source, arch, image, time.perf_counter() - begin, cached, path)


def image_for(source: str, arch: str, defines: tuple[str, ...] = ()) -> bytes:
    """The compiled source to load: from the directory that `DUOVOLT_KERNELS` names if it is there, else from `build`.

    Raises as `build` does; EnvironmentFault names the directory if it lacks the file and nothing can be compiled.
    """
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    if not prebuilt:
        return build(source, arch, defines).image
    path = Path(prebuilt) / file_name(source, arch, defines)
    try:
        return path.read_bytes()
    except OSError as error:
        try:
            return build(source, arch, defines).image
        except EnvironmentFault as fault:
            raise EnvironmentFault(
                f"{path}: {error.strerror}. {PREBUILT_VARIABLE} must name a directory built from this version's "
                f"sources: duovolt kernels build --arch {arch} --out {prebuilt}. Nor can it be compiled here: {fault}"
            ) from None


def compiler_version() -> tuple[int, int]:
    """Of NVRTC, for example (12, 9). Raises EnvironmentFault if it is missing."""
    return nvrtc.load().version


def reaches(arch: str) -> bool:
    """Whether the NVRTC that is there compiles for an architecture. Raises EnvironmentFault if it is missing."""
    return _number(arch) in nvrtc.load().architectures


def write_out(built: Built, directory: Path) -> Path:
    """Store a compiled source in `directory` under its `file_name`; the path. Raises EnvironmentFault if it cannot."""
    path = directory / file_name(built.source, built.arch)
    write_atomically(path, built.image)
    return path


def cache_directory() -> Path:
    """Where compiled kernels and tuning are kept. Raises EnvironmentFault as `checkpoint.cache` does."""
    return cache.cache_directory("kernels")


def _texts(source: str) -> dict[str, bytes]:
    """The source and every header: a header that a source does not include costs a compilation, never a wrong hit."""
    return {path.name: path.read_bytes() for path in (CSRC / source, *sorted(CSRC.glob("*.cuh")))}


def _key(source: str, parts: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for name, text in _texts(source).items():
        digest.update(f"{name} {len(text)}\0".encode() + text)
    return digest.hexdigest()


def _check_target(compiler: nvrtc.Compiler, arch: str) -> None:
    wanted, supported = _number(arch), compiler.architectures
    if wanted in supported:
        return
    name = "NVRTC {}.{}".format(*compiler.version)
    if compiler.version[0] >= FIRST_WITHOUT_VOLTA and wanted < supported[0]:
        raise EnvironmentFault(
            f"{name} cannot compile for {arch}: CUDA 13 dropped Volta. Install a 12.x one: {nvrtc.INSTALL}"
        )
    known = ", ".join(str(number) for number in supported if number >= OLDEST)
    raise InputError(f"architecture {arch!r} is unknown to {name}, which knows {known}.")


def _compile(compiler: nvrtc.Compiler, source: str, arch: str, arguments: list[str]) -> bytes:
    headers = _texts(source)
    text = headers.pop(source)
    try:
        return compiler.compile(source, text, headers, arguments, "CUBIN" if arch.startswith("sm_") else "PTX")
    except nvrtc.CompileError as error:
        raise EnvironmentFault(f"{source} does not compile for {arch}:\n{error}") from None


def _number(arch: str) -> int:
    return int(arch.partition("_")[2])


def _read_cached(path: Path) -> bytes | None:
    """A cached image, None if there is none or its digest does not fit (a disk that lost a write)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return image if xxhash.xxh3_128_digest(image) == digest else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write by rename, with the directories above. Raises EnvironmentFault if it cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{path.parent}: {error.strerror}; compiled kernels are stored there. Choose another directory "
            "(XDG_CACHE_HOME for the cache)."
        ) from None
