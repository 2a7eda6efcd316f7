"""Whether driver and libraries can run a card: the words that a preflight and `duovolt doctor` share.

CUDA 13 dropped Volta: driver branch 580 is the last that drives a V100, CUDA 12.9 the last that compiles for it, and
torch 2.7.1 the last whose default build for it was found to hold its code.
"""

import re
from pathlib import Path

from .fatbin import architectures, runs_on

VOLTA = (7, 0)
LAST_VOLTA_BRANCH = 580
OLDEST_BRANCH = 525  # the first that runs CUDA 12
TORCH_FOR_VOLTA = "2.7.1"
INSTALL_FOR_VOLTA = f'pip install "duovolt[cuda,serve]" torch=={TORCH_FOR_VOLTA}'
LAST_NCCL_FOR_VOLTA = (2, 26)  # later builds may hold no sm_70 code: they fail at the first call, or crash

_MAPS = Path("/proc/self/maps")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)\b")


def driver_version(text: str | None = None) -> str | None:
    """Version of the loaded kernel module, for example 580.159.04; None if there is none. `text`: instead of its file's."""
    if text is None:
        try:
            text = _KERNEL_MODULE.read_text(errors="replace")
        except OSError:
            return None
    found = _DRIVER_VERSION.search(text.partition("\n")[0])
    return found[1] if found else None


def architecture(capability: tuple[int, int]) -> str:
    """`sm_XY`."""
    return f"sm_{10 * capability[0] + capability[1]}"


def driver_fault(version: str | None, volta: bool) -> str | None:
    """Why a driver cannot drive the cards, and what to do; None if it can. `volta`: one of them is a V100."""
    branch = driver_branch(version)
    if branch is None:
        return "no NVIDIA driver is loaded: install one of branch 580 and restart"
    if volta and branch > LAST_VOLTA_BRANCH:
        return (
            f"driver {version} does not drive Volta any more, {LAST_VOLTA_BRANCH} was the last branch that does: "
            f"install {LAST_VOLTA_BRANCH} and hold it there"
        )
    if branch < OLDEST_BRANCH:
        return f"driver {version} is too old for CUDA 12: install branch {LAST_VOLTA_BRANCH}"
    return None


def driver_branch(version: str | None) -> int | None:
    """580 of 580.65.06."""
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else None


def torch_fault(version: str, cuda: str | None, arches: list[str], capability: tuple[int, int]) -> str | None:
    """Why a torch build cannot run a card, and what to do; None if it can. `arches`: torch.cuda.get_arch_list()."""
    wanted = architecture(capability)
    install = INSTALL_FOR_VOLTA if capability == VOLTA else "pip install torch (the build for CUDA)"
    if cuda is None:
        return f"torch {version} is a build without CUDA: {install}"
    if not runs_on(arches, capability):
        held = ", ".join(arches) or "nothing"
        return f"torch {version} (CUDA {cuda}) holds no code for {wanted}, only for {held}: {install}"
    return None


def nccl_fault(version: tuple[int, ...] | None, arches: list[str] | None, capability: tuple[int, int]) -> str | None:
    """Why NCCL cannot be relied on for a card, and what to do; None if it can.

    `arches`: what its file holds, None where the file was not found or not read; then the version must tell.
    """
    if version is None:
        return "torch has no NCCL: large exchanges between ranks need it"
    name = "NCCL " + ".".join(map(str, version))
    remedy = f"torch=={TORCH_FOR_VOLTA} brings one that does (nvidia-nccl-cu12==2.26.2), or choose `--collective host`"
    if arches:
        if runs_on(arches, capability):
            return None
        return f"{name} holds no code for {architecture(capability)}, only for {', '.join(arches)}: {remedy}"
    if capability == VOLTA and version[:2] > LAST_NCCL_FOR_VOLTA:
        return f"{name} may hold no code for sm_70, and its file could not be read to find out: {remedy}"
    return None


def nccl_arches(maps: Path = _MAPS) -> list[str] | None:
    """What the NCCL that this process has loaded with torch holds; None where it has none, or as part of a larger file."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for path in sorted({line.split(maxsplit=5)[-1].strip() for line in lines if "/libnccl.so" in line}):
        try:
            return architectures(Path(path)) or None
        except OSError:
            continue
    return None
