"""What the decode linears cost on a V100 must not grow: sm_70.json holds the figures of NVRTC and ptxas 12.9.

After a change that is worth its cost: `duovolt kernels report --json`, and the new figures go into the file.
"""

import json
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.cli.main import main
from duovolt.kernels import build
from duovolt.perf import volta_report
from duovolt.perf.volta_report import Loop, hot_loop

BASELINE = json.loads(Path(__file__).with_name("sm_70.json").read_text())
LISTING = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, [R2] ;
        /*0010*/                   IADD3 R2, R2, 0x10, RZ ;
.L_x_2:
        /*0020*/              @!P0 LOP3.LUT R4, R4, 0xff, RZ, 0xc0, !PT ;
        /*0030*/                   HMMA.884.F32.F32.STEP0 R8, R4, R6, R8 ;
        /*0040*/                   HMMA.884.F32.F32.STEP1 R8, R4, R6, R8 ;
        /*0050*/                   IMAD.SHL.U32 R5, R4, 0x10, RZ ;
        /*0060*/              @P1  BRA `(.L_x_2) ;
        /*0070*/                   HMUL2 R4, R4, R5 ;
        /*0080*/              @P2  BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""


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
        assert one.in_flight >= one.needed, name


def test_loops_are_no_longer(found):
    if all(one.loop is None for one in found.values()):
        pytest.skip("no nvdisasm: that of CUDA 12, or of the triton wheel")
    for name, one in found.items():
        assert one.loop is not None and one.loop.cycles <= BASELINE[name]["cycles"], name
        assert one.share is not None and one.share >= 0.8, name


def test_hot_loop_is_the_smallest_with_a_product():
    assert hot_loop(LISTING.splitlines()) == Loop(issued=5, integer=1, arithmetic=1, tensor=2, memory=0)
    with pytest.raises(EnvironmentFault, match="no loop"):
        hot_loop(["/*0000*/ EXIT ;"])


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
