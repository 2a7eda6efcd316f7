"""Driver and libraries, judged."""

from collections.abc import Iterator

from ...kernels.libraries import (
    INSTALL_FOR_VOLTA,
    LAST_VOLTA_BRANCH,
    VOLTA,
    architecture,
    driver_branch,
    driver_fault,
    nccl_fault,
    torch_fault,
)
from ...runtime.parallel.nccl import warning
from .facts import Facts, Finding
from .judge_cards import is_volta

_OLDEST_NVRTC = (12, 4)
_INSTALL_NVRTC = 'pip install "duovolt[cuda]"'


def judge_software(facts: Facts) -> Iterator[Finding]:
    """Each against every kind of card that is there, or against a V100 where none is."""
    capabilities = sorted({card.capability for card in facts.cards if card.capability is not None})
    yield from _driver(facts)
    if capabilities:
        for capability in capabilities:
            yield from _torch(facts, capability)
            if len(facts.cards) > 1:
                yield from _nccl(facts, capability)
    else:
        yield _torch_alone(facts)
    yield from _nvrtc(facts, capabilities)


def _driver(facts: Facts) -> Iterator[Finding]:
    version = facts.software.driver
    volta = is_volta(facts)
    if version is None and not facts.host.pci_cards and not facts.cards:
        return  # the line about cards says it
    fault = driver_fault(version, volta)
    branch = driver_branch(version)
    if fault is not None:
        text, _, remedy = fault.partition(": ")
        yield Finding("broken", "driver", text, remedy)
    elif volta and branch is not None and branch < LAST_VOLTA_BRANCH:
        yield Finding(
            "limited", "driver", f"{version} drives these cards, branch {LAST_VOLTA_BRANCH} starts kernels sooner",
            f"install branch {LAST_VOLTA_BRANCH}, the last for Volta",
        )  # fmt: skip
    else:
        last = ", the last branch that drives Volta: hold it there" if volta else ""
        yield Finding("good", "driver", f"{version}{last}")


def _torch(facts: Facts, capability: tuple[int, int]) -> Iterator[Finding]:
    software = facts.software
    fault = torch_fault(software.torch, software.torch_cuda, software.torch_arches, capability)
    if fault is None:
        yield Finding(
            "good", "torch", f"{software.torch} (CUDA {software.torch_cuda}) holds code for {architecture(capability)}"
        )
        return
    text, _, remedy = fault.rpartition(": ")
    yield Finding("broken", "torch", text, remedy)


def _torch_alone(facts: Facts) -> Finding:
    software = facts.software
    build = f"CUDA {software.torch_cuda}" if software.torch_cuda else "no CUDA"
    return Finding("good", "torch", f"{software.torch} ({build}); for a V100: {INSTALL_FOR_VOLTA}")


def _nccl(facts: Facts, capability: tuple[int, int]) -> Iterator[Finding]:
    software = facts.software
    fault = nccl_fault(software.nccl, software.nccl_arches, capability)
    if fault is None:
        held = f", code for {', '.join(software.nccl_arches)}" if software.nccl_arches else ""
        reported = warning(software.nccl[:3]) if software.nccl else None  # type: ignore[arg-type]
        known = (
            f"; reported of it: {reported}. `serve` tries it first, and does without if it fails" if reported else ""
        )
        yield Finding("good", "NCCL", f"{'.'.join(map(str, software.nccl or ()))}{held}{known}")
        return
    text, _, remedy = fault.partition(": ")
    yield Finding("limited", "NCCL", text, remedy)


def _nvrtc(facts: Facts, capabilities: list[tuple[int, int]]) -> Iterator[Finding]:
    software = facts.software
    needed: str = "broken" if facts.cards and not software.prebuilt else "limited"
    if software.nvrtc is None:
        yield Finding(
            needed, "NVRTC", f"the CUDA compiler is missing ({software.nvrtc_fault})",  # type: ignore[arg-type]
            f"{_INSTALL_NVRTC}, or compile elsewhere: `duovolt kernels build --out DIR`, and DUOVOLT_KERNELS=DIR here",
        )  # fmt: skip
        return
    name = ".".join(map(str, software.nvrtc))
    if not software.nvrtc_reaches_volta and facts.cards and VOLTA not in capabilities:
        yield Finding("good", "NVRTC", f"{name} compiles for these cards; for a V100 one of CUDA 12 is needed")
    elif not software.nvrtc_reaches_volta:
        grade = "broken" if VOLTA in capabilities and not software.prebuilt else "limited"
        yield Finding(
            grade, "NVRTC", f"{name} does not compile for a V100, CUDA 13 dropped Volta",  # type: ignore[arg-type]
            f"for a V100: {_INSTALL_NVRTC} brings one of CUDA 12",
        )  # fmt: skip
    elif software.nvrtc < _OLDEST_NVRTC:
        yield Finding("limited", "NVRTC", f"{name} is older than those tested (12.4 to 12.9)", _INSTALL_NVRTC)
    else:
        yield Finding("good", "NVRTC", f"{name} compiles for a V100")
