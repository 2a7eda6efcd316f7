"""Shared memory between the warps of a block: the emulated kernels under ThreadSanitizer, a thread a CUDA thread.

It sees what is unordered whether or not it goes wrong. Lanes of one warp meet at each product: races within a warp are not seen.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support import hostbuild
from .conftest import HOST_FLAGS

HERE = Path(__file__).parent
CASES = {
    "slices": ("test_slices.py", "every_count_grid_and_round"),
    "slices of gate and up": ("test_slices.py", "gate_and_up"),
    "one pass": ("test_one_pass.py", ""),
    "one pass of gate and up": ("test_pair_pass.py", "bits_of_bands and unit"),
    "bands and halves": ("test_every_linear.py", "(bands-half-8 or bands-nvfp4-9 or halves-nvfp4-8 or deep-fp8-8)"),
}

pytestmark = pytest.mark.slow


def races(folder: Path, case: str, *flags: str) -> tuple[list[str], int]:
    """Lines of reports that name our sources, and the exit status of the tests."""
    named = subprocess.run(
        [hostbuild.compiler(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    )
    library = Path(named.stdout.strip())
    if not library.is_absolute():
        pytest.skip("the compiler has no ThreadSanitizer")
    file, chosen = CASES[case]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    command += ["-k", f"hopper and {chosen}" if chosen else "hopper"]
    environment = os.environ | {
        "LD_PRELOAD": str(library.resolve()),
        "TSAN_OPTIONS": f"log_path={folder / 'report'}:history_size=4:exitcode=0",
        HOST_FLAGS: " ".join(["-g", "-fsanitize=thread", *flags]),
    }
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert " passed" in done.stdout or " failed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for report in folder.glob("report*") for line in report.read_text().splitlines()]
    return [line for line in lines if ".cuh:" in line or ".hpp:" in line or "host.cpp:" in line], done.returncode


@pytest.mark.parametrize("case", CASES)
def test_no_warp_reads_what_another_may_still_write(tmp_path, case):
    assert races(tmp_path, case) == ([], 0)


def test_a_kernel_without_barriers_is_found_out(tmp_path):
    lines, status = races(tmp_path, "slices", "-DWITHOUT_BARRIERS")
    assert any("linear" in line for line in lines) and status
