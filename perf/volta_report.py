"""What the decode linears cost on a V100, from their sm_70 machine code: no GPU is needed, and none was measured.

Registers, shared memory and spills are ptxas's; the hot loop is the smallest loop of the code with a tensor-core product
in it. A pass of it is one warp's turn: four tiles of 32 x 16. Its cycles on a quarter of a multiprocessor are the
largest of: instructions issued (one a cycle), integer and fp16/FP32 instructions (16 lanes a cycle, so two each), and
tensor-core steps (two each). Code for rare cases lies inside of the loop, so this counts too much.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.errors import EnvironmentFault
from ..kernels.build import build
from ..kernels.linear import SOURCES, THREADS
from ..kernels.tuning import Choice
from .volta_code import BRANCH, Instruction, kernels_of

ARCH = "compute_70"
MULTIPROCESSORS, CLOCK, BANDWIDTH = 80, 1.53e9, 900e9  # SXM2: Hz, bytes/s
LATENCY = 600e-9  # s of a read under load
REGISTERS, SHARED_BYTES, MOST_WARPS, MOST_BLOCKS = 65536, 96 << 10, 64, 32
QUARTERS = 4
NEEDED = BANDWIDTH * LATENCY / MULTIPROCESSORS  # bytes in flight a multiprocessor that the full bandwidth takes
OFFERED = QUARTERS * MULTIPROCESSORS * CLOCK / BANDWIDTH  # cycles of a quarter that there are for a byte
PRODUCT = "HMMA"
TURN_BYTES = {"nvfp4": 4 * 288, "fp8": 4 * 512, "fp8_blocks": 4 * 512, "half": 4 * 1024}
_AHEAD = ("nvfp4", "fp8")  # load the next turn before this one, for up to eight tokens
_INTEGER = {"LOP3", "SHF", "IADD3", "ISETP", "LEA", "SEL", "PRMT", "CS2R", "MOV", "ICMP", "IMNMX", "PLOP3"}
_FLOAT = {"IMAD", "FFMA", "FADD", "FMUL", "HMUL2", "HFMA2", "HADD2"}
_MEMORY = {"LDG", "LDS", "STS", "STG"}


@dataclass(frozen=True)
class Loop:
    """Instructions of one pass of the hot loop, by pipe, and its cycles on a quarter of a multiprocessor."""

    issued: int
    integer: int
    arithmetic: int
    tensor: int
    memory: int

    @property
    def cycles(self) -> int:
        return max(self.issued, 2 * self.integer, 2 * self.arithmetic, 2 * self.tensor)


@dataclass(frozen=True)
class KernelReport:
    """One kernel on a V100."""

    name: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    blocks: int
    warps: int
    in_flight: int
    loop: Loop

    @property
    def slots_a_byte(self) -> float:
        """Cycles of a quarter multiprocessor for a byte of weights."""
        return self.loop.cycles / TURN_BYTES[encoding_of(self.name)]

    @property
    def share(self) -> float:
        """Predicted share of the bandwidth: the least of what issue and bytes in flight allow, at most 1."""
        return min(1.0, OFFERED / self.slots_a_byte, self.in_flight / NEEDED)


def encoding_of(name: str) -> str:
    """`linear_fp8_blocks_8` -> `fp8_blocks`."""
    return name.removeprefix("linear_").rpartition("_")[0]


def report() -> list[KernelReport]:
    """Every decode linear of one encoding. Raises EnvironmentFault if ptxas or NVRTC is missing or fails."""
    ptxas = find_ptxas()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens, source in SOURCES.items():
            cubin = Path(folder) / f"{tokens}.cubin"
            resources = assemble(ptxas, build(source, ARCH).image, cubin)
            code = kernels_of(cubin.read_bytes())
            for name in sorted(resources):
                if encoding_of(name) in TURN_BYTES:
                    found.append(_judge(name, tokens, resources[name], code[name]))
    return found


def find_ptxas() -> Path:
    """ptxas of CUDA 12: of the wheel nvidia-cuda-nvcc-cu12, or on the path. Raises EnvironmentFault."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    candidates = [Path(place) / "cuda_nvcc" / "bin" / "ptxas" for place in places]
    candidates += [Path(path)] if (path := shutil.which("ptxas")) else []
    for candidate in candidates:
        if candidate.is_file() and "sm_70" in _run([candidate, "--help"]):
            return candidate
    raise EnvironmentFault(
        "no ptxas that knows sm_70: CUDA 13 dropped Volta. Install one: pip install 'nvidia-cuda-nvcc-cu12<13'"
    )


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise EnvironmentFault(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers, bytes spilled (stores and loads) and of static shared memory; `threads`: of a block
    at most, 0 where the source does not bound them."""

    registers: int
    spilled: int
    static: int
    threads: int


def assemble(ptxas: Path, ptx: bytes, cubin: Path) -> dict[str, Resources]:
    """Resources by kernel; writes the machine code."""
    source = cubin.with_suffix(".ptx")
    source.write_bytes(ptx)
    bounds = dict(re.findall(r"\.entry (\w+)\([^{]*?\)\s*\.maxntid (\d+)", ptx.decode()))
    found: dict[str, Resources] = {}
    name, spilled = "", 0
    for line in _run([ptxas, "-arch=sm_70", "-v", source, "-o", cubin]).splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Resources(int(match[1]), spilled, int(shared[1]) if shared else 0, int(bounds.get(name, 0)))
    return found


def hot_loop(code: list[Instruction]) -> Loop:
    """The smallest loop with a tensor-core product. Raises EnvironmentFault if the code has none."""
    found = [loop for loop in loops_of(code) if any(one.name == PRODUCT for one in loop)]
    if not found:
        raise EnvironmentFault("the machine code holds no loop with a tensor-core product.")
    return counted(min(found, key=len))


def loops_of(code: list[Instruction]) -> list[list[Instruction]]:
    """The code between each backward branch and its target, both included."""
    return [
        code[index + one.jump : index + 1]
        for index, one in enumerate(code)
        if one.name == BRANCH and -index <= one.jump <= 0
    ]


def counted(code: list[Instruction]) -> Loop:
    """Instructions by pipe."""
    names = Counter(one.name for one in code)
    return Loop(
        issued=names.total(),
        integer=sum(names[name] for name in _INTEGER),
        arithmetic=sum(names[name] for name in _FLOAT),
        tensor=names[PRODUCT],
        memory=sum(names[name] for name in _MEMORY),
    )


def blocks_of(registers: int, threads: int, shared: int) -> int:
    """Of a multiprocessor at once."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    by_shared = SHARED_BYTES // shared if shared else MOST_BLOCKS
    return min(by_registers, by_shared, MOST_WARPS * 32 // threads, MOST_BLOCKS)


def _judge(name: str, tokens: int, found: Resources, code: list[Instruction]) -> KernelReport:
    encoding = encoding_of(name)
    shared = found.static + Choice().shared_bytes(encoding, tokens, ARCH)
    blocks = blocks_of(found.registers, THREADS, shared)
    warps = blocks * THREADS // 32
    turns = 2 if encoding in _AHEAD and tokens == min(SOURCES) else 1
    in_flight = warps * turns * TURN_BYTES[encoding]
    return KernelReport(name, found.registers, shared, found.spilled, blocks, warps, in_flight, hot_loop(code))
