"""Every kernel has a launch that a sanitizer can look at, and what a tool says is read aright."""

import subprocess
import sys

import pytest

from .campaign import GROUPS, Ended


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
