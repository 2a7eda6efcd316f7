"""Machine code of sm_70 read without NVIDIA's tools, held to what nvdisasm printed of it (sm_70_code.txt)."""

import struct
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.perf.volta_code import BRANCH, NAMES, Instruction, kernels_of

LINES = [line.split(maxsplit=2) for line in Path(__file__).with_name("sm_70_code.txt").read_text().splitlines()[1:]]
PRINTED = [(Instruction(int(low, 16), int(high, 16)), text) for low, high, text in LINES]


def elf(sections: dict[str, bytes]) -> bytes:
    """A file with these sections, and one of their names."""
    names, table, body = b"\0", [], b""
    for name, data in {**sections, ".shstrtab": b""}.items():
        data = data if name in sections else names + b".shstrtab\0"
        table.append(struct.pack("<IIQQQQIIQQ", len(names), 1, 0, 0, 64 + len(body), len(data), 0, 0, 0, 0))
        names, body = names + name.encode() + b"\0", body + data
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(table), len(table) - 1)
    return ident + head + body + b"".join(table)


def words(*code: Instruction) -> bytes:
    return b"".join(struct.pack("<QQ", one.low, one.high) for one in code)


def test_every_name_is_the_disassemblers() -> None:
    for one, text in PRINTED:
        bare = text.split(maxsplit=1)[1] if text.startswith("@") else text
        assert one.name == bare.split()[0].split(".")[0]
    assert {one.low & 0x1FF for one, _ in PRINTED} == set(NAMES)


def test_branches_go_where_the_disassembler_says() -> None:
    jumps = [(one.jump, int(text.split()[-1])) for one, text in PRINTED if one.name == BRANCH]
    assert len(jumps) == 6 and all(ours == theirs for ours, theirs in jumps)
    assert min(ours for ours, _ in jumps) < 0 < max(ours for ours, _ in jumps)


def test_kernels_are_the_text_sections() -> None:
    some, others = [one for one, _ in PRINTED[:3]], [one for one, _ in PRINTED[3:7]]
    found = kernels_of(elf({".text.one": words(*some), ".nv.info": b"x", ".text.another_one": words(*others)}))
    assert found == {"one": some, "another_one": others}


@pytest.mark.parametrize("cubin", [b"", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(20), b"{}" * 80])
def test_what_is_no_cubin_is_an_error(cubin: bytes) -> None:
    with pytest.raises(EnvironmentFault, match="no machine code"):
        kernels_of(cubin)


def test_a_cubin_that_is_cut_off_is_an_error() -> None:
    whole = elf({".text.one": words(PRINTED[0][0])})
    for length in range(len(whole) - 24):  # the last fields of a section's header are not read
        with pytest.raises(EnvironmentFault, match="no machine code"):
            kernels_of(whole[:length])


def test_an_instruction_that_nobody_has_named_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"an instruction 0x1ff that perf/volta_code\.py does not know"):
        _ = Instruction(0x1FF, 0).name
