"""The life of a rank process: tie to its parent, say hello, load, loop, and leave with one message if it fails."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback

import zmq

from ...checkpoint.errors import DuovoltError, EnvironmentFault, InputError
from ..parallel.faults import START_DOOR, Fault, read_fault
from ..parallel.lockstep import Lockstep, SharedLockstep, SoloLockstep
from ..parallel.lockstep_log import logged
from ..parallel.mailbox import Mailbox
from ..parallel.region import ProgressCounter, Region
from ..parallel.shared import SharedFile
from ..parallel.waiting import sharpen_naps
from .backends import build_engine, versions
from .identity import RankIdentity, read_identity, scripted_identity
from .loop import RankLoop
from .options import RankOptions
from .wire import Failed, Hello, Ready, encode

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_LINGER_MS = 500  # a failing rank's last word may take this long to leave


def run_rank(options: RankOptions) -> int:
    """Serve until the proxy says stop; returns the exit code."""
    _tie_to_parent(options.parent)
    sharpen_naps()
    _set_name(f"duovolt rank {options.rank}")
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the proxy alone decides what it means
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.sndhwm = 0  # a proxy that is stopped for a while must not hold a rank up: the open answers bound the queue
    socket.connect(options.endpoint)
    try:
        try:
            loop = _start(options, socket)
        except DuovoltError as error:  # the proxy says it: a start that fails has one line
            return _give_up(options, socket, str(error), error.exit_code)
        try:
            loop.run()
            return 0
        except DuovoltError as error:
            print(f"duovolt rank {options.rank}: {error}", file=sys.stderr, flush=True)
            return _give_up(options, socket, str(error), error.exit_code)
    except Exception as error:
        traceback.print_exc()  # into the server's log: an engine fault is a bug, not a user's error
        return _give_up(options, socket, f"internal error: {type(error).__name__}: {error}", 1)
    finally:
        socket.close()
        context.term()


def _start(options: RankOptions, socket: zmq.Socket) -> RankLoop:
    """Say hello, load, say ready."""
    fault = read_fault(START_DOOR)
    identity = _identity(options)
    region = Region(SharedFile.attach(options.shared).memory)
    hello = Hello(
        options.rank,
        options.size,
        os.getpid(),
        identity.conversion_id,
        identity.recipe,
        identity.tokenizer_digest,
        identity.config_digest,
        versions(options.backend),
        options.backend,
    )
    _say(socket, encode(hello), fault, options.rank, stage=0)
    lockstep: Lockstep = SoloLockstep(region)
    mailbox: Mailbox | None = None
    if options.size == 2:
        lockstep = SharedLockstep(region, options.rank, options.exchange_seconds)
        mailbox = Mailbox(region, options.rank, options.exchange_seconds)
    engine, facts = build_engine(options, mailbox)
    progress = ProgressCounter(region, options.rank)
    progress.tick(busy=False)
    _say(socket, encode(Ready(options.rank, facts)), fault, options.rank, stage=1)
    return RankLoop(engine, logged(lockstep, options.shared, options.rank), socket, progress)


def _say(socket: zmq.Socket, message: bytes, fault: Fault | None, rank: int, stage: int) -> None:
    """Send a message of the start; where a fault is ordered for it: late, never, or twice."""
    kind = fault.kind if fault is not None and fault.due(rank, stage) else ""
    while kind == "never":
        signal.pause()
    if kind.isdecimal():
        time.sleep(int(kind) / 1000)
    for _ in range(2 if kind == "twice" else 1):
        socket.send(message)


def _identity(options: RankOptions) -> RankIdentity:
    scripted = options.backend.startswith("scripted")
    identity = scripted_identity(options.dir) if scripted else read_identity(options.dir)
    if (identity.rank, identity.size) != (options.rank, options.size):
        raise InputError(
            f"{options.dir}: its weights are rank {identity.rank} of {identity.size}, "
            f"asked to serve as rank {options.rank} of {options.size}."
        )
    return identity


def _give_up(options: RankOptions, socket: zmq.Socket, message: str, exit_code: int) -> int:
    socket.send(encode(Failed(options.rank, message, exit_code)), zmq.NOBLOCK)
    return exit_code


def _tie_to_parent(parent: int) -> None:
    """Die with the proxy, however it dies: no orphan may hold a card."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise EnvironmentFault(f"cannot tie the rank to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the tie was made
        raise EnvironmentFault("the proxy that started this rank is gone; ranks are started by `duovolt serve`.")


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
