"""What a library holds code for, read from its file, and the words for what is missing."""

import struct
from pathlib import Path

import pytest

from duovolt.kernels.fatbin import architectures, runs_on
from duovolt.kernels.libraries import driver_branch, driver_fault, driver_version, nccl_arches, nccl_fault, torch_fault
from duovolt.runtime.parallel import nccl


def container(*entries: tuple[int, int]) -> bytes:
    """A fat binary of (kind, architecture) entries with a few bytes of code each."""
    body = b""
    for kind, number in entries:
        code = bytes(24)
        body += struct.pack("<HHIQIIII", kind, 0x101, 64, len(code), 0, 0, 0, number).ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_every_container_of_a_file_is_read(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"ELF" * 11 + container((2, 60), (2, 70)) + bytes(5) + container((2, 90), (1, 90), (2, 70)))
    assert architectures(path) == ["sm_60", "sm_70", "compute_90", "sm_90"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x50\xed\x55\xba",
        container((2, 70))[:-80],
        container((7, 70)),
        container((2, 70)).replace(struct.pack("<Q", 88), struct.pack("<Q", 1 << 60)),
        b"\x50\xed\x55\xba" * 5000,
    ],
)
def test_what_is_cut_short_or_is_no_container_is_passed_over(tmp_path, content):
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert architectures(path) == []


def test_a_real_library_agrees():
    pytest.importorskip("nvidia.cuda_runtime", reason="nvidia-cuda-runtime-cu12 is not installed")
    import nvidia.cuda_runtime

    (folder,) = nvidia.cuda_runtime.__path__
    path = Path(folder) / "lib" / "libcudadevrt.a"
    if not path.exists():
        pytest.skip("the package has no libcudadevrt.a")
    assert {"sm_70", "sm_90"} <= set(architectures(path))


@pytest.mark.parametrize(
    ("found", "capability", "runs"),
    [
        (["sm_70"], (7, 0), True),
        (["sm_60", "sm_75"], (7, 0), False),
        (["sm_70"], (7, 5), True),
        (["compute_60"], (7, 0), True),
        (["compute_80", "sm_80"], (7, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_90a"], (9, 0), True),
        ([], (7, 0), False),
    ],
)
def test_code_of_the_same_generation_or_older_ptx_runs(found, capability, runs):
    assert runs_on(found, capability) is runs


def test_the_nccl_of_this_process_is_read_where_it_lies(tmp_path, monkeypatch):
    library, maps = tmp_path / "libnccl.so.2", tmp_path / "maps"
    library.write_bytes(container((2, 75), (2, 90)))
    gone = tmp_path / "gone" / "libnccl.so.1"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 12   {path}\n" for path in ("/lib/libc.so", gone, library)))
    assert nccl_arches(maps) == ["sm_75", "sm_90"]
    assert nccl_arches(tmp_path / "no") is None
    monkeypatch.setattr(nccl, "nccl_arches", lambda: nccl_arches(maps))
    assert "holds no code for sm_70, only for sm_75, sm_90" in (nccl.refusal((2, 28, 3), (7, 0)) or "")
    library.write_bytes(container((2, 70)))
    assert nccl.refusal((2, 28, 3), (7, 0)) is None
    monkeypatch.setattr(nccl, "nccl_arches", lambda: None)
    assert "may hold no code for sm_70" in (nccl.refusal((2, 28, 3), (7, 0)) or "")
    assert nccl.refusal((2, 26, 5), (7, 0)) is None and nccl.refusal((2, 28, 3), (9, 0)) is None


def test_words():
    assert driver_branch("580.65.06") == 580 and driver_branch(None) is None and driver_branch("x") is None
    assert driver_fault("580.65.06", volta=True) is None and driver_fault("590.1", volta=False) is None
    assert "install 580" in (driver_fault("590.1", volta=True) or "")
    assert torch_fault("2.7.1", "12.6", ["sm_70"], (7, 0)) is None
    assert "torch==2.7.1" in (torch_fault("2.12", "13.0", ["sm_75"], (7, 0)) or "")
    assert "torch==2.7.1" not in (torch_fault("2.12", "13.0", ["sm_75"], (9, 0)) or "")
    assert nccl_fault((2, 26, 2), None, (7, 0)) is None and nccl_fault((2, 28, 3), None, (9, 0)) is None
    assert "--collective host" in (nccl_fault((2, 28, 3), [], (7, 0)) or "")


def test_driver_version_of_either_kernel_module():
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Jan  1 00:00:00 UTC 2026\nGCC version: gcc 13.2.0"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.10  Release Build\n"
    assert driver_version(closed) == "580.159.04"
    assert driver_version(opened) == "590.10"
    assert driver_version("nothing") is None
