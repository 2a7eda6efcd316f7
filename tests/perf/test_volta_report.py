"""What the decode linears cost on a V100 must not grow: sm_70.json holds the figures of NVRTC and ptxas 12.9.

After a change that is worth its cost: `duovolt kernels report --json`, and the new figures go into the file.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.cli.main import main
from duovolt.kernels import build
from duovolt.perf import volta_report
from duovolt.perf.volta_code import NAMES, Instruction
from duovolt.perf.volta_report import NEEDED, Loop, hot_loop

BASELINE = json.loads(Path(__file__).with_name("sm_70.json").read_text())
WORDS = {name: opcode for opcode, name in NAMES.items()}


def code(*names: str) -> list[Instruction]:
    """Instructions by name; `BRA-3` goes three back."""
    found = []
    for name in names:
        kind, _, back = name.partition("-")
        offset = -16 * (int(back) + 1) if back else 0
        found.append(Instruction(WORDS[kind] | offset % (1 << 32) << 32, (offset >> 32) % (1 << 18)))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, volta_report.KernelReport]:
    try:
        if (version := build.compiler_version()) != (12, 9):
            pytest.skip(f"the figures are of NVRTC 12.9, here is {version[0]}.{version[1]}")
        return {one.name: one for one in volta_report.report()}
    except EnvironmentFault as missing:
        pytest.skip(str(missing))


def test_registers_spills_and_occupancy_are_no_worse(found):
    assert set(found) == set(BASELINE)
    for name, one in found.items():
        known = BASELINE[name]
        assert one.spilled_bytes <= known["spilled_bytes"], name
        assert (one.registers, -one.blocks) <= (known["registers"], -known["blocks"]), name
        assert one.in_flight >= NEEDED, name


def test_loops_are_no_longer(found):
    for name, one in found.items():
        assert one.loop.cycles <= BASELINE[name]["cycles"], name
        assert one.share >= 0.8, name


def test_hot_loop_is_the_smallest_with_a_product():
    inner = ("LOP3", "HMMA", "HMMA", "IMAD", "BRA-4")
    whole = code("LDG", "IADD3", *inner, "HMUL2", "BRA-8", "EXIT", "BRA-0")
    assert hot_loop(whole) == Loop(issued=5, integer=1, arithmetic=1, tensor=2, memory=0)
    with pytest.raises(EnvironmentFault, match="no loop"):
        hot_loop(code("HMMA", "EXIT", "BRA-0"))


def test_what_worsens_is_found(found, monkeypatch):
    """The guards above fail for a loop that is longer by a cycle, a register or a spill more, fewer bytes under way."""
    name = "linear_nvfp4_8"
    one = found[name]
    longer = replace(one.loop, issued=one.loop.cycles + 1)
    worse = ({"loop": longer}, {"registers": one.registers + 1}, {"spilled_bytes": 4}, {"blocks": 2, "in_flight": 6000})
    for change in worse:
        guard = test_loops_are_no_longer if "loop" in change else test_registers_spills_and_occupancy_are_no_worse
        with pytest.raises(AssertionError):
            guard({**found, name: replace(one, **change)})
    assert one.share == 1.0 and replace(one, loop=replace(one.loop, issued=1600)).share == pytest.approx(
        0.392, abs=1e-3
    )


def test_the_command_prints_every_figure_of_every_kernel(found, capsys):
    assert main(["kernels", "report"]) == 0
    head, _, columns, *rows = capsys.readouterr().out.split("\n")[1:-1]
    assert head == "issue slots of its quarters offered: 0.544 a byte"
    assert " ".join(columns.split()) == (
        "regs shared spilled blocks warps in flight slots a byte a KFLOP share TFLOP/s"
    )
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    one = found["linear_fp8_8"]
    assert by_name["linear_fp8_8"] == [
        str(one.registers), str(one.shared_bytes), "0", "3", "24", "98.3", "KB", f"{one.slots_a_byte:.3f}", "1.00"
    ]  # fmt: skip
    attention, prefill = by_name["attention_int8_3"], by_name["attention_prefill_int8"]
    assert len(attention) == 9 and float(attention[7]) < 0.544 and attention[8] == "1.00"
    assert len(prefill) == 7 and prefill[3:5] == ["1", "8"] and float(prefill[6]) > 37.5
    assert len(by_name["sampling_draw"]) == 5 and by_name["linear_any_24"][1:] == ["28512", "0", "1", "8"]
    assert (
        sum(len(row) >= 5 for row in by_name.values()) > 75 and len(by_name) > 80
    )  # blocks and warps, where sources bound them


def test_command_judges_sm_70_only(capsys):
    assert main(["kernels", "report", "--arch", "sm_90"]) == 2
    assert "sm_70 only" in capsys.readouterr().err


def test_bench_and_tune_say_that_they_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in (["bench", "kernels"], ["kernels", "tune"]):
        assert main(command) == 3
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--tokens", "25"], ["--only", "nothing"], ["--prefill", "0"]]
)
def test_bench_refuses_what_it_cannot_measure(arguments, capsys):
    assert main(["bench", "kernels", *arguments]) == 2
    assert capsys.readouterr().err.startswith("duovolt: ")
