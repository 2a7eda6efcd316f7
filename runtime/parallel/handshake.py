"""What two ranks tell each other before they exchange on devices: bytes and facts, through the CPU mailbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ...checkpoint.errors import CheckFailed, EnvironmentFault
from .mailbox import Mailbox

T = TypeVar("T")


def exchange_bytes(mailbox: Mailbox, mine: bytes) -> bytes:
    """Send bytes to the peer and return its bytes. Raises MailboxTimeout."""
    padded = len(mine).to_bytes(4, "little") + mine + bytes(-len(mine) % 4)
    theirs = mailbox.exchange(np.frombuffer(padded, dtype=np.float32)).tobytes()
    return theirs[4 : 4 + int.from_bytes(theirs[:4], "little")]


def exchange_facts(mailbox: Mailbox, mine: dict[str, Any]) -> dict[str, Any]:
    """As `exchange_bytes`, a JSON object each way. Raises CheckFailed where the peer is elsewhere and sent another thing."""
    try:
        facts = json.loads(exchange_bytes(mailbox, json.dumps(mine).encode()))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise CheckFailed("the other rank sent no JSON object")
    return facts


def agreed(mailbox: Mailbox, mine: dict[str, Any]) -> dict[str, Any]:
    """Exchange facts; where either rank has an `error`, both raise it as an EnvironmentFault."""
    theirs = exchange_facts(mailbox, mine)
    for rank, facts in ((mailbox.rank, mine), (1 - mailbox.rank, theirs)):
        if "error" in facts:
            raise EnvironmentFault(f"rank {rank}: {facts['error']}")
    return theirs


def attempt(mailbox: Mailbox, action: Callable[[], tuple[T, dict[str, Any]]]) -> tuple[T, dict[str, Any]]:
    """What `action` makes, and the peer's facts about its own. Where either fails, both raise EnvironmentFault."""
    try:
        made, facts = action()
    except EnvironmentFault as error:
        agreed(mailbox, {"error": str(error)})
        raise
    return made, agreed(mailbox, facts)
