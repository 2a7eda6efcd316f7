"""Lists the packages: the repository root is the package `duovolt`, so setuptools cannot find them by itself."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ROOMS = ("checkpoint", "model", "kernels", "convert", "shard", "verify", "runtime", "perf", "cli", "tiny")


def packages() -> list[str]:
    """Dotted names of every folder with an __init__.py below the rooms, tests left out."""
    found = ["duovolt"]
    for room in ROOMS:
        for init in sorted((ROOT / room).rglob("__init__.py")):
            found.append("duovolt." + ".".join(init.parent.relative_to(ROOT).parts))
    return found


class BuildRooms(build_py):
    """Leaves this file, which lies in the root package's folder, out of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]


setup(
    packages=packages(),
    cmdclass={"build_py": BuildRooms},
    package_data={
        "duovolt": ["py.typed"],
        "duovolt.kernels": ["csrc/*.cu", "csrc/*.cuh"],
        "duovolt.convert": ["recipes/*.toml"],
        "duovolt.perf": ["cards/*.toml", "known_answers.json"],
        "duovolt.perf.graded": ["items.jsonl"],
        "duovolt.runtime.proxy.page": ["*.html", "*.css", "*.js", "*.svg"],
        "duovolt.tiny": ["checkpoint/*", "*.txt", "README.md"],
    },
)
