"""Which compiler library is loaded, what is said when there is none, and what it does with text."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.kernels import nvrtc

KERNEL = b'#include "twice.h"\nextern "C" __global__ void fill(float* out, float x) { out[threadIdx.x] = twice(x); }\n'
HEADERS = {"twice.h": b"__device__ float twice(float x) { return x + x; }\n"}
OPTIONS = ["--gpu-architecture=compute_70"]


@pytest.fixture
def compiler():
    try:
        return nvrtc.load()
    except EnvironmentFault as missing:
        pytest.skip(str(missing))


@pytest.fixture
def places(monkeypatch):
    """Places to look in, given by the test; what is found is not kept."""

    def put(*paths):
        monkeypatch.setattr(nvrtc, "_places", lambda: iter(map(str, paths)))
        monkeypatch.setattr(nvrtc, "load", nvrtc.load.__wrapped__)
        return nvrtc.load

    return put


def foreign(folder: Path, name: str, file: str, monkeypatch, content: bytes = b"") -> Path:
    """An installed distribution `name` that lists `file` and nothing else; the file's path."""
    info = folder / f"{name.replace('-', '_')}-12.9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 12.9.1\n")
    (info / "RECORD").write_text(f"{file},,\n")
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    monkeypatch.syspath_prepend(str(folder))
    return path


def test_the_wheel_for_cuda_12_comes_first(compiler):
    (path,) = nvrtc.installed("nvidia-cuda-nvrtc-cu12") or [None]
    if path is None:
        pytest.skip("the wheel is not installed: duovolt[cuda]")
    assert next(nvrtc._places()) == str(path) == compiler.path
    version = metadata.version("nvidia-cuda-nvrtc-cu12").split(".")
    assert compiler.version == (int(version[0]), int(version[1]))
    assert {70, 80, 90} <= set(compiler.architectures)


def test_the_drivers_bindings_are_not_asked(compiler):
    """They load the compiler of their own CUDA: with torch of CUDA 13 one that knows no Volta."""
    script = (
        "import sys; sys.modules['cuda'] = None; from duovolt.kernels import nvrtc; print(nvrtc.load().architectures)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(compiler.architectures), done.stderr


def test_its_builtins_are_loaded_from_beside_it(compiler):
    """NVRTC opens them by name alone, and not every wheel tells the loader where they lie."""
    beside = Path(compiler.path).with_name("libnvrtc-builtins.so.{}.{}".format(*compiler.version))
    if not beside.is_file():
        pytest.skip("this compiler is a toolkit's, which the loader knows")
    script = "from duovolt.kernels import nvrtc; nvrtc.load(); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert str(beside) in done.stdout


def test_files_beside_the_library_are_not_taken_for_it(tmp_path, monkeypatch):
    for number, file in enumerate(("libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.9", "nvrtc.h")):
        foreign(tmp_path / str(number), f"other-{number}", f"nvidia/lib/{file}", monkeypatch)
        assert nvrtc.installed(f"other-{number}") == []
    path = foreign(tmp_path / "right", "right", "nvidia/lib/libnvrtc.so.13", monkeypatch)
    assert nvrtc.installed("right") == [path]
    path.unlink()
    assert nvrtc.installed("right") == []  # listed and gone
    assert nvrtc.installed("nowhere") == []


def test_one_place_after_the_other_is_tried(compiler, places, tmp_path):
    damaged = tmp_path / "libnvrtc.so.12"
    damaged.write_bytes(b"\x7fELF")
    assert places(damaged, "libnvrtc.so.0", compiler.path)().path == compiler.path


def test_a_missing_library_says_what_to_install(places):
    with pytest.raises(EnvironmentFault, match=r'missing \(libnvrtc\.so\.0: cannot open.*\)\. .*"duovolt\[cuda\]"'):
        places("libnvrtc.so.0", "libnvrtc.so.1")()


def test_another_library_is_not_taken_for_the_compiler(places):
    with pytest.raises(EnvironmentFault, match=r"libc\.so\.6 is no NVRTC: .*nvrtcVersion"):
        places("libc.so.6")()


def test_text_becomes_ptx_and_machine_code(compiler):
    ptx = compiler.compile("fill.cu", KERNEL, HEADERS, OPTIONS, "PTX")
    assert b".target sm_70" in ptx and b".entry fill(" in ptx and b"\0" not in ptx
    cubin = compiler.compile("fill.cu", KERNEL, HEADERS, ["--gpu-architecture=sm_70"], "CUBIN")
    assert cubin[:4] == b"\x7fELF" and cubin[48] == 70


def test_words_about_a_fault_name_the_file(compiler):
    with pytest.raises(nvrtc.CompileError, match=r'fill\.cu\(1\): .*cannot open source file "twice\.h"'):
        compiler.compile("fill.cu", KERNEL, {}, OPTIONS, "PTX")
    with pytest.raises(nvrtc.CompileError, match="--nonsense"):
        compiler.compile("fill.cu", KERNEL, HEADERS, [*OPTIONS, "--nonsense"], "PTX")
    assert compiler.compile("fill.cu", KERNEL, HEADERS, OPTIONS, "PTX")  # and goes on working


def test_a_call_that_fails_names_the_library(compiler):
    with pytest.raises(EnvironmentFault, match=r"nvrtcGetCUBINSize of .*libnvrtc\S* failed: NVRTC_ERROR_\w+"):
        compiler._call("nvrtcGetCUBINSize", None, nvrtc.ctypes.c_size_t())
