"""What attention, the delta rule, elementwise kernels and sampling cost on a V100, from their sm_70 machine code.

As for the linears (`volta_report`): a bound by instructions issued, by pipes and by bytes in flight, and no measurement. A
kernel's cost is that of one pass of a loop, or of its whole code, by so many warps, for so many bytes of memory or
floating-point operations. Waits between phases are not in it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..kernels.attention import shared_bytes as attention_shared_bytes
from ..kernels.build import build, sources
from ..kernels.delta_chunks import CHUNK, PREPARE_BYTES, scan_shared_bytes
from ..kernels.kvcache import DIM, PAGE
from ..kernels.linear import SOURCES
from ..kernels.linear import THREADS as LINEAR_THREADS
from ..kernels.prefill_attention import ROWS, own_shared_bytes
from ..kernels.tuning import Choice
from ..kernels.wide import THREADS, WIDTHS
from ..kernels.wide import shared_bytes as wide_shared_bytes
from .volta_code import Instruction, kernels_of
from .volta_report import (
    ARCH,
    CLOCK,
    MULTIPROCESSORS,
    NEEDED,
    OFFERED,
    PRODUCT,
    QUARTERS,
    TURN_BYTES,
    Loop,
    assemble,
    blocks_of,
    counted,
    encoding_of,
    find_ptxas,
    loops_of,
)

HIDDEN, HEAD, GROUP = 5120, 128, 6
PRODUCTS, LARGEST, WHOLE, NOTHING = "loop with products", "largest loop", "whole", ""  # which code is a unit's


@dataclass(frozen=True)
class Unit:
    """What a pass costs and gives. nbytes: of memory; flops: of useful products; flight: bytes that a block asks for ahead."""

    threads: int
    code: str
    nbytes: int
    flops: int = 0
    warps: int = 0  # that share the unit, all of a block's if 0
    shared: int = 0
    flight: int = 0


def _attention() -> dict[str, Unit]:
    found = {}
    for form, page in (("int8", PAGE * (2 * DIM + 16)), ("fp16", PAGE * 4 * DIM)):
        for tiles in range(1, 6):
            found[f"attention_{form}_{tiles}"] = Unit(
                256, PRODUCTS, page, shared=attention_shared_bytes(tiles, 70, int8=form == "int8"), flight=page
            )
    return found


def _prefill(int8: bool) -> Unit:
    used = ROWS[int8] // GROUP * GROUP  # the others have no token
    return Unit(256, PRODUCTS, 0, flops=4 * used * PAGE * DIM, shared=own_shared_bytes(int8))


def _wide() -> dict[str, Unit]:
    """A step of all warps: 64 columns of 64 rows each, for the tokens of a block; the next step is on its way."""
    found = {}
    for encoding, widths in WIDTHS.items():
        nbytes = THREADS // 32 * 2 * TURN_BYTES[encoding]
        for width in widths:
            flops = THREADS // 32 * 2 * 64 * 64 * width
            found[f"wide_{encoding}_{width}"] = Unit(
                THREADS, PRODUCTS, nbytes, flops, shared=wide_shared_bytes(encoding, width, ARCH), flight=nbytes
            )
    return found


UNITS: Mapping[str, Mapping[str, Unit]] = {
    "attention.cu": _attention(),
    "attention_prefill.cu": {
        "attention_prefill_int8": _prefill(True),
        "attention_prefill_fp16": _prefill(False),
    },
    "delta.cu": {"delta_decode": Unit(128, WHOLE, 2 * 32 * HEAD * 4, flight=32 * HEAD * 4)},
    "delta_chunks.cu": {
        "chunks_prepare": Unit(256, WHOLE, CHUNK * (7 * HEAD * 2 + 2 * HEAD * 2 + CHUNK * 2), shared=PREPARE_BYTES),
        "chunks_scan": Unit(256, PRODUCTS, CHUNK * (3 * HEAD + CHUNK) * 2, shared=scan_shared_bytes(70)),
    },
    "linear_wide.cu": _wide(),
    **{
        source: {
            f"linear_any_{tokens}": Unit(
                LINEAR_THREADS, NOTHING, 0, shared=max(Choice().shared_bytes(name, tokens, ARCH) for name in TURN_BYTES)
            )
        }
        for tokens, source in SOURCES.items()
    },
    "norm.cu": {
        "rms_norm": Unit(320, WHOLE, 14 * HIDDEN, flight=8 * HIDDEN),
        "rms_norm_5120": Unit(320, WHOLE, 14 * HIDDEN, flight=8 * HIDDEN),
        "gated_rms_norm": Unit(128, WHOLE, 4 * 10 * HEAD, flight=4 * 8 * HEAD),
        "gated_rms_norm_many": Unit(128, WHOLE, 12 * 10 * HEAD, flight=12 * 8 * HEAD),
        "output_gate": Unit(256, LARGEST, 10 * 4 * 32, warps=1, flight=8 * 8 * 4 * 32),
        "embed_bf16": Unit(256, WHOLE, 5 * 256 * 4 * 6, flight=5 * 256 * 4 * 2),
    },
    "rope.cu": {
        "qkv_rope_int8": Unit(96, WHOLE, 6 * DIM, warps=2, flight=4 * DIM),  # the third warp runs a tenth of the code
        "qkv_rope_fp16": Unit(96, WHOLE, 6 * DIM, warps=2, flight=4 * DIM),
    },
}  # fmt: skip


@dataclass(frozen=True)
class FamilyReport:
    """One kernel on a V100. `static_bytes`: of shared memory, by ptxas; `cost`: of a warp's pass, None without a unit that says
    what is counted; `threads`: of a block at most, 0 if that is not known."""

    name: str
    registers: int
    spilled_bytes: int
    static_bytes: int
    unit: Unit | None
    cost: Loop | None
    threads: int = 0

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what the launch asks for."""
        return self.static_bytes + (self.unit.shared if self.unit else 0)

    @property
    def blocks(self) -> int:
        """Of a multiprocessor; 0 where the threads of a block are not known."""
        threads = self.unit.threads if self.unit else self.threads
        return blocks_of(self.registers, threads, self.shared_bytes) if threads else 0

    @property
    def warps(self) -> int:
        """Of a multiprocessor; 0 likewise."""
        return self.blocks * (self.unit.threads if self.unit else self.threads) // 32

    @property
    def in_flight(self) -> int:
        """Bytes that a multiprocessor's blocks have asked for; 0 where memory is not the limit."""
        return self.blocks * self.unit.flight if self.unit else 0

    @property
    def slots(self) -> float | None:
        """Cycles of a quarter multiprocessor for a unit."""
        if self.unit is None or self.cost is None:
            return None
        return self.cost.cycles * (self.unit.warps or self.unit.threads // 32)

    @property
    def cycles(self) -> float | None:
        """Of a multiprocessor, for a unit."""
        return None if self.slots is None else self.slots / QUARTERS

    @property
    def slots_a_byte(self) -> float | None:
        """Cycles of a quarter multiprocessor for a byte of memory."""
        return None if self.slots is None or not self.unit or not self.unit.nbytes else self.slots / self.unit.nbytes

    @property
    def slots_a_flop(self) -> float | None:
        """Cycles of a quarter multiprocessor for a floating-point operation of products."""
        return None if self.slots is None or not self.unit or not self.unit.flops else self.slots / self.unit.flops

    @property
    def share(self) -> float | None:
        """Predicted share of the bandwidth, for what memory limits."""
        if self.slots_a_byte is None or not self.in_flight:
            return None
        return min(1.0, OFFERED / self.slots_a_byte, self.in_flight / NEEDED)

    @property
    def tflops(self) -> float | None:
        """Predicted bound in TFLOP/s, for what products limit."""
        if self.slots_a_flop is None:
            return None
        return QUARTERS * MULTIPROCESSORS * CLOCK / self.slots_a_flop * 1e-12


def report_families() -> list[FamilyReport]:
    """Every kernel but the linears of one encoding. Raises EnvironmentFault if ptxas or NVRTC is missing or fails."""
    ptxas = find_ptxas()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sources():
            units = UNITS.get(source, {})
            cubin = Path(folder) / f"{source}.cubin"
            resources = assemble(ptxas, build(source, ARCH).image, cubin)
            code = kernels_of(cubin.read_bytes()) if units else {}
            for name in sorted(resources):
                if encoding_of(name) in TURN_BYTES:
                    continue  # `volta_report` has it
                unit = units.get(name)
                cost = _cost(unit, code[name]) if unit and unit.code else None
                one = resources[name]
                found.append(FamilyReport(name, one.registers, one.spilled, one.static, unit, cost, one.threads))
    return found


def _cost(unit: Unit, code: list[Instruction]) -> Loop:
    if unit.code == WHOLE:
        return counted(code)
    loops = loops_of(code)
    if unit.code == PRODUCTS:
        return counted(min((loop for loop in loops if any(one.name == PRODUCT for one in loop)), key=len))
    return counted(max(loops, key=len))
