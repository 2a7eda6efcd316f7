"""What is said of the cards, with a driver's library of our own in place of NVIDIA's."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import pytest

from duovolt.runtime.proxy.cards import CardReader, read_cards


class NVMLError(Exception):
    """As the library's own."""


def library(**changes: Any) -> types.ModuleType:
    """A pynvml of two V100; `changes` replace functions."""
    module = types.ModuleType("pynvml")

    def refuse(*arguments: Any) -> Any:
        raise NVMLError("Not Supported")

    functions: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"Tesla V100-SXM2-32GB" if handle else "Tesla V100-SXM2-32GB",
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41 + handle,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1380, 2: 877}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1530,
        "nvmlDeviceGetPowerUsage": lambda handle: 151_500,
        "nvmlDeviceGetEnforcedPowerLimit": refuse,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=13_000_000_000, total=34_359_738_368),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=87),
    }
    for name, value in (functions | changes).items():
        setattr(module, name, value)
    return module


def test_cards_tell_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    (first, second), reason = read_cards()
    assert reason is None
    assert (first.index, second.index) == (0, 1) and first.name == second.name == "Tesla V100-SXM2-32GB"
    assert (first.temperature, second.temperature) == (41, 42)
    assert (first.clock, first.most_clock, first.memory_clock, first.busy_percent) == (1380, 1530, 877, 87)
    assert (first.power, first.power_limit) == (151.5, None)  # what one card does not tell is left out
    assert (first.memory_used, first.memory) == (13_000_000_000, 34_359_738_368)


def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    for module, words in (
        (library(nvmlInit=fail), "the NVIDIA driver does not answer: Driver Not Loaded"),
        (library(nvmlDeviceGetCount=lambda: 0), "the NVIDIA driver sees no card"),
        (None, "nvidia-ml-py is not installed"),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        cards, reason = read_cards()
        assert cards == [] and reason is not None and words in reason


def test_the_driver_is_asked_at_most_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=lambda: asked.append(1)))

    async def read() -> list[Any]:
        reader = CardReader()
        return [await reader.read() for _ in range(5)]

    answers = asyncio.run(read())
    assert len(asked) == 1 and all(answer == answers[0] for answer in answers) and len(answers[0][0]) == 2
