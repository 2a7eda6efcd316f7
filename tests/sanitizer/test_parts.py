"""Every kernel has a launch that a sanitizer can look at, and what a tool says is read aright."""

import subprocess
import sys
from pathlib import Path

import pytest

from .campaign import CONTROLS, GROUPS, Ended


@pytest.mark.timeout(600)
def test_every_kernel_is_launched_with_arguments_that_its_operation_takes(tmp_path):
    """Without a card: by the operations' own checks and ways, against the compiled kernels' names."""
    record = tmp_path / "record"
    command = [sys.executable, "-m", "duovolt.tests.sanitizer", "--recorded", "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "through, 0 faults" in done.stdout
    said = [line for line in done.stdout.splitlines() if "; never: " in line]
    assert [line.partition(":")[0] for line in said] == ["sm_90", "compute_70"]
    assert all(line.endswith("; never: none") for line in said), said
    launched = {line.split()[1] for line in record.read_text().splitlines()}
    assert {
        "rms_norm_5120",
        "qkv_rope_int8",
        "linear_nvfp4_pairs_8",
        "mailbox_reduce_norm",
        "sampling_list",
    } <= launched


def test_groups_hold_every_part_once_for_each_architecture():
    parts = " ".join(GROUPS.values()).split()
    assert len(parts) == len(set(parts))
    native = {part for part in parts if "@" not in part}
    assert {part.partition("@")[0] for part in parts if "@" in part} == native - {
        "ways",
        "neighbours",
    }  # which it has not


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("through, 0 faults\n========= ERROR SUMMARY: 0 errors\n", True),
        ("through, 0 faults\n========= ERROR SUMMARY: 10 errors\n", False),
        ("through, 0 faults\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("through, 0 faults\n========= RACECHECK SUMMARY: 12 hazards displayed (0 errors, 12 warnings)\n", False),
        ("through, 1 faults linear\n========= ERROR SUMMARY: 0 errors\n", False),
        ("========= ERROR SUMMARY: 0 errors\n", False),  # cut off
        ("through, 0 faults\n", True),  # without a tool
    ],
)
def test_a_log_is_clean_if_all_ran_and_nothing_was_found(tmp_path, text, clean):
    log = tmp_path / "log"
    log.write_text(text)
    assert Ended("one", log, 0).clean is clean


def test_a_control_counts_where_the_tool_names_it(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "=========     at rms_norm_5120+0x4e0\n========= Error: Race reported between Write access at control_race_async+0xe0\n"
    )
    found = Ended("control", log, 0)
    assert found.names("rms_norm") and found.names("control_race_async")
    assert not found.names("control_race") and not found.names("norm") and not found.names("control_sound")
    source = Path(__file__).with_name("control.cu").read_text()
    assert all(name in source for wrong, sound in CONTROLS.values() for name in (*wrong, *sound) if name != "rms_norm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linears"], "there is no part linears"),
        (["round@sm_70"], "there is no part round@sm_70"),
        (["--recorded", "--record", "{folder}/none/record", "round"], "No such file or directory"),
        (["--coverage", "{folder}/none"], "No such file or directory"),
        (["--coverage", "{folder}/wrong"], "is no line of a record"),
    ],
)
def test_what_is_asked_for_amiss_is_said_in_a_line(tmp_path, arguments, message):
    (tmp_path / "wrong").write_text("norm.cu rms_norm sm_90 many\n")
    command = [sys.executable, "-m", "duovolt.tests.sanitizer", *(one.format(folder=tmp_path) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
