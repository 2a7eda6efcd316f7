"""Tests that may hang or crash run in processes of their own: started, bounded in time, and killed if need be."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from .facts import Card, Link, Load, Sample

LINK_SECONDS = 60.0
_START_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5
_LAST_WORDS = 300
_PACKAGE = __name__.rpartition(".")[0]


def start(module: str, cards: list[Card], *arguments: str) -> "subprocess.Popen[bytes]":
    """A module of this package as a process that sees these cards only, numbered as the driver numbers them."""
    environment = os.environ | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(card.index) for card in cards),
    }
    return subprocess.Popen(
        [sys.executable, "-m", f"{_PACKAGE}.{module}", *arguments],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def link(first: Card, second: Card, seconds: float = LINK_SECONDS) -> Link:
    """What `link_child` found until it ended or had to be killed."""
    found = Link(first.index, second.index)
    process = start("link_child", [first, second])
    try:
        output, errors = process.communicate(timeout=seconds)
        fault = None if process.returncode == 0 else _died(process.returncode, errors)
    except subprocess.TimeoutExpired:
        process.kill()
        output, fault = _rest(process), f"it hung, and was stopped after {seconds:.0f} s"
    finally:
        _stop(process)
    for line in reversed(output.splitlines()):
        try:
            told = msgspec.json.decode(line, type=Link)
        except msgspec.MsgspecError:
            continue
        return msgspec.structs.replace(told, first=first.index, second=second.index, fault=told.fault or fault)
    return msgspec.structs.replace(found, fault=fault or "it said nothing")


def load(
    cards: list[Card],
    seconds: float,
    sample: Callable[[Card, float], Sample | None],
    tell: Callable[[float], None] = lambda passed: None,
) -> Load:
    """All cards at work together; `sample` is asked for each of them, and `tell` told what has passed, twice a second."""
    samples: list[list[Sample]] = [[] for _ in cards]
    processes = [start("burn_child", [card], str(seconds)) for card in cards]
    fault = None
    try:
        for card, process in zip(cards, processes, strict=True):
            if not _ready(process):
                return Load(seconds, samples, f"GPU {card.index}: {_ended(process)}")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            for card, mine in zip(cards, samples, strict=True):
                if (found := sample(card, passed)) is not None:
                    mine.append(found)
            if dead := [pair for pair in zip(cards, processes, strict=True) if pair[1].poll()]:
                card, process = dead[0]
                fault = f"GPU {card.index}: {_ended(process)}"
                break  # what the others would still show is not the load that was asked for
            tell(passed)
            time.sleep(min(_SAMPLE_SECONDS, max(0.0, seconds - passed)))
        for card, process in zip(cards, processes, strict=True) if fault is None else ():
            try:
                if process.wait(_START_SECONDS):
                    fault = fault or f"GPU {card.index}: {_ended(process)}"
            except subprocess.TimeoutExpired:
                fault = fault or f"GPU {card.index} does not come to an end"
    except BrokenPipeError:
        fault = "a process that keeps a card at work ended at once"
    finally:
        for process in processes:
            _stop(process)
    return Load(seconds, samples, fault)


def _ready(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it said so in time; it is killed if not, which ends the reading."""
    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline().strip() == b"ready"
    finally:
        timer.cancel()


def _errors(process: "subprocess.Popen[bytes]") -> bytes:
    """Of a process that has ended, or is about to."""
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.stderr is not None
    return process.stderr.read()


def _rest(process: "subprocess.Popen[bytes]") -> bytes:
    """What a killed process had said; nothing of one that does not even die."""
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        return b""


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """A process inside a sick driver may not die: it is left behind."""
    if process.poll() is None:
        process.kill()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            return
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                continue


def _ended(process: "subprocess.Popen[bytes]") -> str:
    errors = _errors(process)
    return _died(process.poll(), errors)


def _died(code: int | None, errors: bytes) -> str:
    text = errors.decode(errors="replace").strip().splitlines()
    last = "".join(c for c in text[-1] if c.isprintable())[:_LAST_WORDS] if text else "it said nothing"
    return f"the test ended with code {code}: {last}"
