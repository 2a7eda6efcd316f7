"""Clocks, temperatures and memory of the NVIDIA cards, where the driver's own library answers."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from .workers import Workers

_FRESH_SECONDS = 2.0
_MISSING = "nvidia-ml-py is not installed: pip install nvidia-ml-py"


@dataclass(frozen=True)
class Card:
    """One card. Clocks in MHz, temperature in degrees Celsius, power in watts, memory in bytes; None: not told."""

    index: int
    name: str
    temperature: int | None
    clock: int | None
    most_clock: int | None
    memory_clock: int | None
    power: float | None
    power_limit: float | None
    memory_used: int | None
    memory: int | None
    busy_percent: int | None


def read_cards() -> tuple[list[Card], str | None]:
    """All cards in the driver's order, and, if there are none to be seen, why."""
    try:
        import pynvml
    except ImportError:
        return [], _MISSING
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer: {error}"
    try:
        cards = [_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return cards, None if cards else "the NVIDIA driver sees no card"
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


class CardReader:
    """Reads at most every two seconds, beside the event loop: a sick driver may take its time."""

    def __init__(self) -> None:
        self._workers = Workers(1)
        self._found: tuple[list[dict[str, Any]], str | None] = ([], None)
        self._read_at = float("-inf")

    async def read(self) -> tuple[list[dict[str, Any]], str | None]:
        """Cards as JSON values, and why there are none; what was last known while another reading is under way."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS and not self._workers.running:
            cards, reason = await self._workers.run(read_cards)
            self._found = [asdict(card) for card in cards], reason
            self._read_at = time.monotonic()
        return self._found


def _card(pynvml: Any, index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Any, *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:  # not every card tells everything
            return None

    name = ask(pynvml.nvmlDeviceGetName)
    power, limit = ask(pynvml.nvmlDeviceGetPowerUsage), ask(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    memory, rates = ask(pynvml.nvmlDeviceGetMemoryInfo), ask(pynvml.nvmlDeviceGetUtilizationRates)
    return Card(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        temperature=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        clock=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        most_clock=ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        memory_clock=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        memory_used=None if memory is None else int(memory.used),
        memory=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
    )
