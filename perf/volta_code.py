"""Machine code of sm_70, instruction by instruction: names, and where branches go; read from a cubin, with no tool of NVIDIA's.

A cubin is a 64-bit ELF file, with a section `.text.NAME` for each kernel. An instruction has 128 bits: the lowest nine say which
it is, whatever its operands. A branch's target is relative to the instruction behind it: 50 bits with a sign, from bit 32 on.
The table holds what our kernels are made of, as nvdisasm 12.8 names it; another instruction is refused, not guessed at.
"""

import struct
from dataclasses import dataclass

from ..checkpoint.errors import EnvironmentFault

BYTES = 16  # of an instruction
OPCODE = 0x1FF
BRANCH = "BRA"
NAMES = {
    0x002: "MOV", 0x003: "P2R", 0x004: "R2P", 0x005: "CS2R", 0x006: "VOTE", 0x007: "SEL", 0x008: "FSEL", 0x009: "FMNMX",
    0x00B: "FSETP", 0x00C: "ISETP", 0x010: "IADD3", 0x011: "LEA", 0x012: "LOP3", 0x013: "IABS", 0x016: "PRMT",
    0x019: "SHF", 0x01C: "PLOP3", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x024: "IMAD", 0x025: "IMAD",
    0x028: "DMUL", 0x029: "DADD", 0x02A: "DSETP", 0x02B: "DFMA", 0x030: "HADD2", 0x032: "HMUL2", 0x036: "HMMA",
    0x100: "FLO", 0x101: "BREV", 0x102: "FCHK", 0x104: "F2F", 0x105: "F2I", 0x106: "I2F", 0x108: "MUFU", 0x109: "POPC",
    0x110: "F2F", 0x111: "F2I", 0x112: "I2F", 0x113: "FRND", 0x118: "NOP", 0x119: "S2R", 0x11D: "BAR", 0x141: "BSYNC",
    0x142: "BREAK", 0x144: "CALL", 0x145: "BSSY", 0x146: "YIELD", 0x147: BRANCH, 0x148: "WARPSYNC", 0x14D: "EXIT",
    0x150: "RET", 0x155: "BMOV", 0x180: "LD", 0x181: "LDG", 0x182: "LDC", 0x184: "LDS", 0x186: "STG", 0x188: "STS",
    0x189: "SHFL", 0x18E: "RED", 0x18F: "CCTL", 0x192: "MEMBAR", 0x1AB: "ERRBAR",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """`low`, `high`: its 64-bit words."""

    low: int
    high: int

    @property
    def name(self) -> str:
        """Without its variants. Raises EnvironmentFault for one that the table does not have."""
        try:
            return NAMES[self.low & OPCODE]
        except KeyError:
            raise EnvironmentFault(
                f"machine code of sm_70 holds an instruction {self.low & OPCODE:#05x} that perf/volta_code.py does not know: "
                "compile with NVRTC and ptxas 12.9, or add the name that nvdisasm gives it."
            ) from None

    @property
    def jump(self) -> int:
        """Of a branch: instructions from this one to its target, below 0 for a loop."""
        offset = self.low >> 32 | (self.high & (1 << 18) - 1) << 32
        return 1 + (offset - (offset >> 49 << 50)) // BYTES


def kernels_of(cubin: bytes) -> dict[str, list[Instruction]]:
    """Code by kernel. Raises EnvironmentFault for what is no cubin of 64 bits."""
    try:
        if cubin[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no little-endian ELF file of 64 bits")
        (begin,) = struct.unpack_from("<Q", cubin, 0x28)
        size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        sections = [struct.unpack_from("<IIQQQQ", cubin, begin + size * index) for index in range(count)]
        text = sections[names][4]
        found = {}
        for name, _, _, _, offset, nbytes in sections:
            label = cubin[text + name : cubin.index(b"\0", text + name)].decode()
            if label.startswith(".text."):
                code = struct.iter_unpack("<QQ", cubin[offset : offset + nbytes])
                found[label.removeprefix(".text.")] = [Instruction(*words) for words in code]
        return found
    except (struct.error, ValueError, IndexError) as error:
        raise EnvironmentFault(f"ptxas has written no machine code that can be read: {error}.") from None
