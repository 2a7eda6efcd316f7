"""Where a prompt's work runs: its own stream and room for plain weights, or neither; no GPU."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duovolt.kernels import plain_kept
from duovolt.kernels.plain_kept import PlainKept
from duovolt.kernels.tuning import Choice
from duovolt.model.config import ModelConfig
from duovolt.perf.shapes import configuration
from duovolt.runtime.engine.cuda import prompts
from duovolt.runtime.engine.cuda.plan import ahead_bytes, plain_bytes
from duovolt.runtime.engine.cuda.prompts import Prompts

CARD = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of a card, as one would have it; the choice and capability may be set by the test."""
    seen: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            seen.append((self.name, "behind", other.name))

    @contextmanager
    def on(stream: Stream) -> Any:
        seen.append(("on", stream.name))
        yield

    @contextmanager
    def reading(kind: Any) -> Any:
        seen.append(kind)
        yield

    def ahead(elements: int, device: torch.device) -> Any:
        seen.append(elements)
        return SimpleNamespace(reading=reading)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(f"prompts {priority}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("outer"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(prompts, "choice_on", lambda device: Choice(wide_up_to=256))
    monkeypatch.setattr(prompts, "PlainAhead", ahead)
    return seen


def made(tp: int = 2) -> Prompts:
    return Prompts(ModelConfig.from_dict(configuration("qwen3.8-27b")), tp, CARD)


def test_work_goes_behind_the_callers_and_the_callers_behind_it(told: list[Any]) -> None:
    found = made()
    assert found.ahead and found.told == ",ahead:512"
    with pytest.raises(RuntimeError, match="in the middle"), found.stream():
        with found.reading("read", 200), found.reading("read", 300):
            pass
        raise RuntimeError("in the middle")
    layer = 5120 * (2 * 1024 + 2 * 3072 + 2 * 24 + 3072 + 3 * 8704)
    assert told == [
        int(1.25 * layer), ("prompts -1", "behind", "outer"), ("on", "prompts -1"), ("read", True), ("read", False),
        ("outer", "behind", "prompts -1"),
    ]  # fmt: skip
    assert 2 * told[0] == ahead_bytes(ModelConfig.from_dict(configuration("qwen3.8-27b")), 2, 1.25)


def test_weights_of_the_models_layers_stay_and_those_of_drafts_do_not(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a card that makes none ahead, too; where memory is short after all, one line, and everything in turn."""
    config, seen = ModelConfig.from_dict(configuration("qwen3.8-27b")), []

    def room(elements: int, of: int, device: torch.device, lately: int) -> PlainKept:
        seen.append((elements, of, device, lately))
        return PlainKept(64, 64, torch.device("cpu"))

    def full(elements: int, of: int, device: torch.device, lately: int) -> PlainKept:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(prompts, "PlainKept", room)
    found = Prompts(config, 2, CARD, keep=1 << 30)
    assert seen == [(1 << 29, plain_bytes(config, 2) // 2, CARD, 0)] and found.kept == "0.00GB" and not found.ahead
    with found.reading("read", 200):
        assert plain_kept._current.get() is found._kept
    with found.reading("drafts", 200, layers=False):
        assert plain_kept._current.get() is None
    Prompts(config, 2, CARD, keep=1 << 30, halves=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Prompts(config, 2, CARD, keep=1 << 30, halves=True)  # what is not here is made ahead
    assert [one[3] for one in seen] == [0, 5120 * (2 * 1024 + 2 * 3072 + 2 * 24 + 3072 + 3 * 8704), 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(prompts, "PlainKept", full)
    found = Prompts(config, 2, CARD, keep=1 << 30)
    assert found.kept == "off" and "no room to keep prompts' plain weights" in capsys.readouterr().err
    with found.reading("read", 200):
        assert plain_kept._current.get() is None


@pytest.mark.parametrize("why", ["an older card", "a choice", "no room"])
def test_without_room_or_wish_everything_is_as_it_was(
    told: list[Any], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(elements: int, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if why == "an older card":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    elif why == "a choice":
        monkeypatch.setattr(prompts, "choice_on", lambda device: Choice(plain_ahead=0))
    else:
        monkeypatch.setattr(prompts, "PlainAhead", full)
    found = made()
    with found.stream(), found.reading("read", 2048):
        pass
    assert told == [] and not found.ahead and found.told == ""
    assert ("no room to make prompts' plain weights ahead" in capsys.readouterr().err) == (why == "no room")
    assert not Prompts(ModelConfig.from_dict(configuration("tiny")), 1, torch.device("cpu")).ahead
