"""What pip is asked for can be had together with what torch asks for, and `make demo` asks for no CUDA."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH = json.loads(Path(__file__).with_name("torch_requires.json").read_text())
DEV, VOLTA = "2.13.0", "2.7.1"
PYTHONS = ["3.11", "3.12", "3.13"]


def wanted(extras: set[str], python: str) -> dict[str, SpecifierSet]:
    """What an installation with `extras` asks of each package on Linux, extras of our own followed."""
    lines, seen, found = list(PROJECT["dependencies"]), set(), {}
    while extras - seen:
        extra = (extras - seen).pop()
        seen.add(extra)
        for line in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == PROJECT["name"]:
                extras = extras | requirement.extras
            else:
                lines.append(line)
    return merged(lines, python, found)


def merged(lines: list[str], python: str, found: dict[str, SpecifierSet]) -> dict[str, SpecifierSet]:
    where = {"platform_system": "Linux", "platform_machine": "x86_64", "python_version": python, "extra": ""}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(where):
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def satisfiable(specifiers: SpecifierSet) -> bool:
    """Whether some version fits all: where ranges meet, one of their ends or a version just after one does."""
    ends = {Version(one.version.removesuffix(".*")) for one in specifiers}
    after = {Version(f"{end.public}.0.1") for end in ends}
    return not ends or any(specifiers.contains(version) for version in ends | after)


def clashes(extras: set[str], torch: list[str], python: str) -> list[str]:
    together = merged(torch, python, wanted(extras, python))
    return [f"{name} {specifiers}" for name, specifiers in together.items() if not satisfiable(specifiers)]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("extras", "version"), [({"dev"}, DEV), ({"cuda", "serve", "monitor"}, VOLTA)])
def test_pypis_torch_can_be_had_with_every_extra(extras: set[str], version: str, python: str) -> None:
    assert clashes(extras, [f"torch=={version}", *TORCH[version]], python) == []


def test_the_torch_that_is_here_can_be_had_too() -> None:
    """The development environment's, whichever build it is: a CUDA build asks for more than the one for the CPU."""
    here = [f"torch=={Version(metadata.version('torch')).public}", *(metadata.requires("torch") or [])]
    assert clashes({"cuda", "serve"}, here, "3.11") == []


def test_a_clash_is_seen() -> None:
    ours = wanted({"dev"}, "3.11")
    assert {"cuda-bindings", "nvidia-cuda-nvrtc-cu12", "torch", "starlette", "av"} <= set(ours)
    assert str(ours["torch"]) in ("==2.13.0,>=2.6", ">=2.6,==2.13.0")
    assert not satisfiable(SpecifierSet(">=12.9,<13") & SpecifierSet("<14,>=13.0.3"))
    assert not satisfiable(SpecifierSet("==12.6.77") & SpecifierSet(">=12.9,<13"))
    assert satisfiable(SpecifierSet(">=12.9,<14") & SpecifierSet("<14,>=13.0.3"))
    assert satisfiable(SpecifierSet(">1,<2")) and satisfiable(SpecifierSet())
    assert clashes({"dev"}, ["cuda-bindings<12"], "3.11") != []
    assert clashes({"dev"}, ["torch==2.7.1"], "3.11") != []


def test_the_lists_are_of_the_versions_that_we_name() -> None:
    assert f"torch=={DEV}" in PROJECT["optional-dependencies"]["dev"]
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/v100.md", "packaging/Dockerfile")]
    assert {version for text in texts for version in re.findall(r"torch==([\d.]+\d)", text)} == {VOLTA}
    assert "cuda-bindings" in " ".join(TORCH[DEV]) and "nvidia-cuda-nvrtc-cu12" in " ".join(TORCH[VOLTA])


def test_the_demo_asks_for_no_cuda_and_for_what_serving_needs() -> None:
    asked = wanted({"serve"}, "3.11")
    assert not [name for name in asked if "cuda" in name or name.startswith("nvidia")]
    assert re.search(r'^\$\(DEMO_STAMP\):.*\n.*install -q -e "\.\[serve\]"$', (ROOT / "Makefile").read_text(), re.M)


def made(target: str, *variables: str) -> str:
    """What make would do for a target in a fresh clone, whatever the make that runs this test was told."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH_INDEX"))}
    return subprocess.run(
        ["make", "-n", "-B", target, "VENV=no-such-environment", *variables],
        cwd=ROOT, env=own, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


@pytest.mark.parametrize("target", ["demo", "contracts"])
def test_the_torch_that_was_tested_is_installed_before_anything_that_wants_torch(target: str) -> None:
    """From an index for the CPU if one is given; if that has none, as without."""
    for index in ([], ["--index-url http://mirror/cpu "]):
        asked = re.findall(
            r"pip install (.*?)(?: \\)?$", made(target, *["TORCH_INDEX=http://mirror/cpu"][: len(index)]), re.M
        )
        chosen = [line for line in asked if "--upgrade pip" not in line]
        own = f'-q -e ".[{"serve" if target == "demo" else "dev"}]"'
        assert chosen[-2:] == [f'-q "torch=={DEV}"', own]
        assert chosen[:-2] == [f'-qq --no-deps --retries 1 {one}"torch=={DEV}"' for one in index]


def test_calls_of_the_driver_are_those_of_its_bindings() -> None:
    """Two series of the bindings are allowed: in the one that is here all that we call exists, with as many arguments."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: duovolt[cuda]")
    counted = {}
    for path in (ROOT / "kernels/module.py", ROOT / "kernels/peer.py", ROOT / "runtime/rank/cards.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and re.match("cu[A-Z]", str(first.value)):
                counted.setdefault(first.value, set()).add(len(node.args) - 1)
            elif isinstance(node.func, ast.Attribute) and re.match("cu[A-Z]", node.func.attr):
                counted.setdefault(node.func.attr, set()).add(len(node.args))
    assert {"cuLaunchKernelEx", "cuIpcOpenMemHandle", "cuDeviceGetUuid"} <= set(counted) and len(counted) > 20
    wrong = {
        name: numbers
        for name, numbers in counted.items()
        if numbers != {len(inspect.signature(getattr(driver, name)).parameters)}
    }
    assert wrong == {}
