"""The wheel holds what the product needs: every package, CUDA sources, the tiny model, the page, the recipes."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = "duovolt/tests/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel that a clean copy of the tracked files gives."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, clone]
    subprocess.run(command, check=True, capture_output=True, timeout=170)
    return set(zipfile.ZipFile(next(out.glob("*.whl"))).namelist())


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: set[str]) -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    expected = {f"duovolt/{n}" for n in listed if not n.startswith(("tests/", "setup.py")) and (ROOT / n).is_file()}
    assert expected <= wheel, sorted(expected - wheel)
    assert not [name for name in wheel if name.startswith(TESTS) or name.endswith("setup.py")]


@pytest.mark.parametrize("pattern", [
    "duovolt/kernels/csrc/linear_8.cu",
    "duovolt/convert/recipes/v100.toml",
    "duovolt/perf/graded/items.jsonl",
    "duovolt/runtime/proxy/page/index.html",
    "duovolt/runtime/proxy/page/main.js",
    "duovolt/runtime/proxy/page/style.css",
    "duovolt/runtime/proxy/page/icon.svg",
    "duovolt/tiny/checkpoint/tokenizer.json",
    "duovolt/tiny/checkpoint/model.safetensors.index.json",
    "duovolt/tiny/heldout.txt",
    "duovolt/tiny/words.txt",
    "duovolt/py.typed",
])  # fmt: skip
def test_assets_are_in_the_wheel(pattern: str, wheel: set[str]) -> None:
    assert pattern in wheel


def test_headers_of_the_cuda_sources_too(wheel: set[str]) -> None:
    sources = {path.name for path in (ROOT / "kernels" / "csrc").iterdir() if path.suffix in (".cu", ".cuh")}
    assert {f"duovolt/kernels/csrc/{name}" for name in sources} <= wheel
