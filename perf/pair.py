"""Two processes that measure the same thing as the two ranks of a model: this one and a child, joined as ranks are."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import torch

from ..checkpoint.errors import DuovoltError, EnvironmentFault
from ..runtime.parallel.choice import Choice, choose
from ..runtime.parallel.device import DeviceCollective
from ..runtime.parallel.handshake import exchange_bytes
from ..runtime.parallel.mailbox import Mailbox
from ..runtime.parallel.owner import owner_is_dead
from ..runtime.parallel.region import Region, region_bytes
from ..runtime.parallel.shared import SharedFile
from ..runtime.parallel.timing import Meet
from ..runtime.parallel.unwinding import unwound_by_signals
from ..runtime.parallel.ways import open_way

MEETING_SECONDS = 600.0  # one rank may take longer to make its weights
WAIT_SECONDS = 20.0
_GRACE_SECONDS = 60.0


def way_between(wish: str, devices: Sequence[int]) -> Choice:
    """As `serve` chooses between two cards; both ranks on one card have only host memory, or what is named.

    Raises EnvironmentFault where the cards are not there or cannot exchange.
    """
    count = torch.cuda.device_count()
    if max(devices) >= count:
        raise EnvironmentFault(f"--devices {','.join(map(str, devices))}: this machine shows {count} cards.")
    if devices[0] == devices[1] or wish != "auto":
        small = "host" if wish == "auto" else wish
        return Choice.parse({"nccl": "nccl", "host": "host,halves,peer"}.get(small, f"{small},peer"))
    return choose("auto")


@dataclass(frozen=True)
class Partner:
    """The other rank: the `name` of the memory in which both meet, and whether its process has `gone`."""

    name: str
    gone: Callable[[], bool]

    @staticmethod
    def first(name: str) -> Partner:
        """The rank that made the memory of this name, as the second one sees it."""
        return Partner(name, partial(owner_is_dead, name))

    def meet(self, rank: int, seconds: float) -> Mailbox:
        """The mailbox of `rank`, once the partner has come to it; its waits are of `seconds`, or end with the partner.

        Raises MailboxTimeout if it does not come, EnvironmentFault if the memory is gone.
        """
        mailbox = Mailbox(Region(SharedFile.attach(self.name).memory), rank, seconds, gone=self.gone)
        mailbox.meet(MEETING_SECONDS)
        return mailbox


@contextlib.contextmanager
def twin(words: Sequence[str]) -> Iterator[Partner]:
    """Run `duovolt WORDS --twin NAME` beside this process, as the partner of this one. It ends with the block.

    Raises EnvironmentFault if the child fails, with its reason also where the block failed of that.
    """
    shared = SharedFile.create(region_bytes())
    with unwound_by_signals(), tempfile.TemporaryFile() as errors:  # a pipe would have to be read all the while
        command = [sys.executable, "-m", "duovolt", *words, "--twin", shared.name]
        child = subprocess.Popen(command, stderr=errors)
        try:
            yield Partner(shared.name, lambda: child.poll() is not None)
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(f"the second rank did not end within {_GRACE_SECONDS:.0f} s of the first.") from None
        except DuovoltError:
            if child.poll():
                raise _ended(child.returncode, errors) from None
            raise
        finally:
            child.kill()
            child.wait()
            shared.unlink()
        if child.returncode:
            raise _ended(child.returncode, errors)


def _ended(code: int, errors: IO[bytes]) -> EnvironmentFault:
    errors.seek(0)
    last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return EnvironmentFault(f"the second rank ended with exit code {code}: {last[0]}")


def words_of(what: str, args: argparse.Namespace, positional: Sequence[str] = ()) -> list[str]:
    """`bench WHAT` with the same choices, as words for the second rank."""
    words = ["bench", what, "--quiet"]
    for name, value in vars(args).items():
        if (
            name in ("what", "command", "quiet", "debug", "json", "twin", *positional)
            or value is None
            or value is False
        ):
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, *map(str, value if isinstance(value, list) else [value])]
    for name in positional:
        words[2:2] = getattr(args, name)
    return words


def part(link: DeviceCollective, meet: Meet) -> None:
    """Close the way once both ranks have come to it: neither frees what the other may still use."""
    meet()
    close = getattr(link, "close", None)
    if close is not None:
        close()


def join(partner: Partner, rank: int, way: Choice, device: torch.device) -> tuple[DeviceCollective, Meet]:
    """Meet the other rank and open the way; what opens it, and a call that returns when both have made it.

    Raises as `open_way` and `Partner.meet` do.
    """
    mailbox = partner.meet(rank, WAIT_SECONDS)
    return open_way(way, mailbox, device, WAIT_SECONDS), partial(exchange_bytes, mailbox, b"")
