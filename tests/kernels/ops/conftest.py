"""Each test of an operation runs twice: on the host, where the CUDA source is emulated, and on a GPU (mark `gpu`)."""

import ctypes
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.kernels import checks
from duovolt.kernels.build import CSRC
from duovolt.kernels.module import PORTABLE, forced_arch, overlapping
from duovolt.tests.support import hostbuild

FIBERS = Path(__file__).with_name("fibers.hpp")
REPLACED = (
    "half.cuh",
    "volta.cuh",
    "ampere.cuh",
    "warp_product.cuh",
    "shared.cuh",
    "cluster.cuh",
)  # their instructions are the emulator's
LINK = Path(__file__).with_name("link.hpp")  # in place of link.cuh
ARCHES = {"volta": 700, "ampere": 800, "hopper": 900}
KERNEL_HEADER = re.compile(r'^#include "(chunks_\w+\.cuh)"$', re.M)  # kernels of one source, a file each
BOUNDS = re.compile(r"__launch_bounds__\([^()]*\)")
KERNEL = re.compile(r"__global__\s+void\s+(\w+)\(|^[A-Z_0-9]+\((\w+),", re.M)  # written out, or made by a macro


# Where launches overlap: what a kernel may read before it waits for the one before it (`half.cuh`). Behind a norm, which
# lets the next one begin before it has waited itself, that is weights alone.
_POOL = {"keys", "key_scales", "values", "value_scales"}  # pages that are older than this round: test_attention.py
EARLY_READS = {
    "attention": {"tables", "counts", "starts", "firsts", *_POOL},
    "attention_merge": {"positions", "gate"},
    "delta_decode_apart": {
        "lanes",
        "counts",
        "firsts",
        "accepted",
        "turns",
        "weight",
        "a_log",
        "dt_bias",
        "state",
        "rows",
    },
    "rms_norm": {"weight"},
    "gated_rms_norm": {"weight"},
    "gated_rms_norm_many": {"weight"},
    "qkv_rope": {"axes", "positions", "slots", "cosines", "sines", "query_weight", "key_weight"},
    "embed": set(),
    "embed_many": set(),
    "mailbox_reduce": set(),
    "mailbox_reduce_norm": set(),
    "mailbox_gather": set(),
}
EARLY_READS["qkv_rope_many"] = EARLY_READS["qkv_rope"]
EARLY_READS["rms_norm_5120"] = EARLY_READS["rms_norm"]
EARLY_WRITES = {"delta_decode_apart": {"state", "rows"}}  # what it alone keeps


class Early(ctypes.Structure):
    """As in fibers.hpp."""

    _fields_ = (
        ("read", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("fresh", ctypes.c_int),
        ("never", ctypes.c_int),
    )


class Emulated:
    """A CUDA source compiled for the host, launched as a module on a device is.

    `fresh`: tensors that the launch before writes. `early`: what a kernel has read before it waited, by name of kernel.
    """

    def __init__(self, library: ctypes.CDLL, arch: str, parameters: dict[str, list[str]] | None = None) -> None:
        self._library = library
        self.arch = arch
        self.overlaps = self.clusters = arch == "sm_90"
        self.parameters = parameters or {}
        self.fresh: list[torch.Tensor] = []
        self.early: dict[str, set[str]] = {}

    def launch(
        self,
        name: str,
        blocks: int | tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        overlap: bool = False,
        cluster: int = 1,
    ) -> None:
        self._library.cluster_of(cluster)
        slots = b"".join(_slot(argument) for argument in arguments)
        inside = [
            (place, tensor)
            for place, argument in enumerate(arguments)
            for tensor in getattr(argument, "tensors", [argument])
            if isinstance(tensor, torch.Tensor)
        ]
        ranges = [_range(tensor) for _, tensor in inside]
        flat = [bound for bounds in ranges for bound in bounds]
        written = [bound for tensor in self.fresh for bound in _range(tensor)]
        self._library.overlap_fresh((ctypes.c_void_p * len(written))(*written), len(self.fresh))
        grid = (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1, 1)[:3]
        stray = getattr(self._library, f"emulate_{name}")(
            (ctypes.c_int * 3)(*grid),
            threads,
            ctypes.create_string_buffer(slots, len(slots)),
            len(arguments),
            (ctypes.c_void_p * len(flat))(*flat),
            len(ranges),
        )
        assert stray != -1, f"{name}: threads of a block wait for one another for ever"
        assert stray != -2, f"{name}: {len(arguments)} arguments do not fit the kernel"
        assert stray == 0, f"{name}: {stray} accesses outside of the buffers, or not aligned"
        if overlap and (
            self.arch == "sm_90" or name.startswith("mailbox")
        ):  # the others' sources differ by architecture
            self._check_overlap(name, [place for place, _ in inside])

    def _check_overlap(self, name: str, places: list[int]) -> None:
        """A kernel that may begin before its predecessor has ended keeps to the rule of `half.cuh`."""
        found = Early()
        self._library.overlap_report(ctypes.byref(found))
        names = [self.parameters[name][place] for place in places]
        read, written = (
            {own for bit, own in enumerate(names) if mask >> bit & 1} for mask in (found.read, found.written)
        )
        family = re.sub(r"_(int8|fp16|fp32|bf16)(_\d)?$", "", name)
        assert found.never == 0, f"{name}: {found.never} blocks end without having waited for the launch before"
        assert found.fresh == 0, f"{name}: {found.fresh} early accesses to what the launch before writes"
        assert read <= EARLY_READS[family], f"{name} reads {read - EARLY_READS[family]} before it waits"
        assert written <= EARLY_WRITES.get(family, set()), f"{name} writes {written} before it waits"
        self.early.setdefault(name, set()).update(read)


def _slot(argument: Any) -> bytes:
    if isinstance(argument, torch.Tensor):
        return struct.pack("<Q", argument.data_ptr())
    if isinstance(argument, float):
        return struct.pack("<fxxxx", argument)
    if isinstance(argument, ctypes.Structure):
        return struct.pack("<Q", ctypes.addressof(argument))
    if isinstance(argument, ctypes.c_void_p):
        return struct.pack("<Q", argument.value or 0)
    return struct.pack("<q", 0 if argument is None else argument)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def compiled(source: str, arch: str, folder: Path) -> Emulated:
    for header in CSRC.glob("*.cuh"):
        shutil.copy(header, folder)
    for name in REPLACED:
        (folder / name).write_text("")
    shutil.copy(LINK, folder / "link.cuh")
    text = (CSRC / source).read_text(encoding="utf-8")
    (folder / source).write_text(text, encoding="utf-8")
    parts = [text, *((CSRC / name).read_text(encoding="utf-8") for name in KERNEL_HEADER.findall(text))]
    found = [pair for part in parts for pair in KERNEL.findall(BOUNDS.sub("", part))]
    names = [first or second for first, second in found if first != "name"]
    doors = "".join(
        f'extern "C" int emulate_{name}(const int *g, int t, const uint64_t *a, int n, const Range *r, int m)'
        f" {{ return emulate({name}, g, t, a, n, r, m); }}\n"
        for name in names
    )
    main = f'#include "{FIBERS}"\n#include "{source}"\n{doors}'
    library = hostbuild.build(folder, main, ["-O2", f"-D__CUDA_ARCH__={ARCHES[arch]}"])
    return Emulated(ctypes.CDLL(str(library)), f"sm_{ARCHES[arch] // 10}", parameters_of(text))


def parameters_of(text: str) -> dict[str, list[str]]:
    """Names of every kernel's parameters; those of a macro's kernels under each name that it makes."""
    text = BOUNDS.sub("", text).replace("\\\n", " ")
    found = dict(_named(text))
    found.pop("name", None)
    for macro, body in re.findall(r"^#define (\w+)\(name,[^)]*\)(.*)$", text, re.M):
        parameters = dict(_named(body)).get("name")
        if parameters is not None:
            found |= dict.fromkeys(re.findall(rf"^{macro}\((\w+),", text, re.M), parameters)
    return found


def _named(text: str) -> Iterator[tuple[str, list[str]]]:
    for name, parameters in re.findall(r"(\w+)\(([^()]*)\)\s*\{", text):
        yield name, [parameter.split()[-1].lstrip("*") for parameter in parameters.split(",") if parameter.strip()]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Emulated]:
    """Compiles a source once a session: emulated(source, "volta" or "ampere")."""
    made: dict[tuple[str, str], Emulated] = {}

    def get(source: str, arch: str) -> Emulated:
        if (source, arch) not in made:
            made[source, arch] = compiled(source, arch, tmp_path_factory.mktemp(f"{Path(source).stem}-{arch}"))
        return made[source, arch]

    return get


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU = [pytest.param(name, marks=needs_gpu) for name in ("portable", "native")]


def place(
    kind: str, emulated: Callable[[str, str], Emulated], monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if kind in ARCHES:
        monkeypatch.setattr(checks, "module_on", lambda source, device: emulated(source, kind))
        yield torch.device("cpu")
    elif kind == "portable":  # what a V100 runs
        with forced_arch(PORTABLE):
            yield torch.device("cuda", 0)
    else:  # and launches overlap, as in a captured round
        with overlapping():
            yield torch.device("cuda", 0)


@pytest.fixture(params=["volta", *ON_GPU])
def device(request, emulated, monkeypatch) -> Iterator[torch.device]:
    """Where to put a test's tensors: the CPU, with the kernels emulated, or the GPU with either build."""
    yield from place(request.param, emulated, monkeypatch)


@pytest.fixture(params=["volta", "hopper", *ON_GPU])
def overlapping_device(request, emulated, monkeypatch) -> Iterator[torch.device]:
    """As `device`, for kernels that go another way where launches overlap."""
    yield from place(request.param, emulated, monkeypatch)


@pytest.fixture(params=["volta", "ampere", "hopper", *ON_GPU])
def every_device(request, emulated, monkeypatch) -> Iterator[torch.device]:
    """As `device`, for kernels that also decode by architecture."""
    yield from place(request.param, emulated, monkeypatch)


@pytest.fixture(params=["volta", "ampere", *ON_GPU])
def tensor_core_device(request, emulated, monkeypatch) -> Iterator[torch.device]:
    """As `device`, for kernels whose source chooses a tensor-core product by architecture."""
    yield from place(request.param, emulated, monkeypatch)
