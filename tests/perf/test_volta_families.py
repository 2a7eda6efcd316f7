"""What every other kernel costs on a V100 must not grow: sm_70_families.json holds the figures of NVRTC and ptxas 12.9."""

import json
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.kernels import build
from duovolt.perf.volta_families import FamilyReport, Unit, report_families
from duovolt.perf.volta_report import Loop

BASELINE = json.loads(Path(__file__).with_name("sm_70_families.json").read_text())
PUBLISHED_PREFILL = 37.5  # TFLOP/s of a V100 attention kernel for prompts
WIDE = 100  # TFLOP/s that a wide linear's instructions allow, of 125


@pytest.fixture(scope="module")
def found() -> dict[str, FamilyReport]:
    try:
        if (version := build.compiler_version()) != (12, 9):
            pytest.skip(f"the figures are of NVRTC 12.9, here is {version[0]}.{version[1]}")
        return {one.name: one for one in report_families()}
    except EnvironmentFault as missing:
        pytest.skip(str(missing))


def test_nothing_is_spilled_and_registers_are_no_more(found):
    assert set(BASELINE) <= set(found)
    assert {name: one.spilled_bytes for name, one in found.items() if one.spilled_bytes} == {}
    known = {name: figures["registers"] for name, figures in BASELINE.items()}
    grown = {name: found[name].registers for name, registers in known.items() if found[name].registers > registers}
    assert grown == {}


def test_code_is_no_longer_and_predicts_enough(found):
    known = {name: figures["cycles"] for name, figures in BASELINE.items() if "cycles" in figures}
    assert {name for name, one in found.items() if one.cycles is not None} == set(known)
    assert {name: found[name].cycles for name, cycles in known.items() if found[name].cycles > cycles} == {}
    for name, one in found.items():
        if name.startswith("attention_prefill"):
            assert one.tflops > PUBLISHED_PREFILL, name
        elif name.startswith("wide_") and name != "wide_sum":
            assert one.tflops > WIDE, name
        elif one.share is not None:
            assert one.share >= 0.6, name


def test_bounds_follow_from_instructions_and_bytes():
    loop = Loop(issued=400, integer=10, arithmetic=10, tensor=100, memory=4)
    one = FamilyReport("name", 128, 0, 512, Unit(256, "whole", 32768, flight=1024, shared=40 << 10), loop)
    assert (one.blocks, one.warps, one.shared_bytes, one.in_flight) == (2, 16, 41472, 2048)
    assert one.cycles == 400 * 8 / 4 and one.slots_a_byte == 400 * 8 / 32768 and one.slots_a_flop is None
    assert one.share == pytest.approx(2 * 1024 / (900e9 * 600e-9 / 80))  # too little is under way
    assert one.tflops is None
    tight = FamilyReport("name", 128, 0, 8 << 10, one.unit, loop)
    assert (tight.blocks, tight.shared_bytes) == (2, 48 << 10)
    assert FamilyReport("name", 128, 0, (8 << 10) + 1, one.unit, loop).blocks == 1  # 96 KB a multiprocessor
    products = FamilyReport("name", 255, 0, 0, Unit(256, "whole", 0, flops=1 << 20), loop)
    assert products.tflops == pytest.approx((1 << 20) / 800 * 80 * 1.53e9 * 1e-12) and products.share is None
    bound = FamilyReport("name", 32, 0, 0, None, None, threads=512)
    assert (bound.blocks, bound.warps, bound.in_flight, bound.share) == (4, 64, 0, None)
    assert FamilyReport("name", 32, 0, 0, None, None).blocks == 0
    assert products.slots_a_flop == 400 * 8 / (1 << 20) and products.in_flight == 0
