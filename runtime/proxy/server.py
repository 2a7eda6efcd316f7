"""The proxy process from plan to last breath: socket, HTTP server, supervisor, signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.routing import Route

from ...checkpoint.address import require_host
from ...checkpoint.errors import EnvironmentFault
from ..grammar import prepare
from .app import Api
from .connections import ACCEPTED_AT_ONCE, FileShortage, PatientProtocol, most_connections
from .errors import unavailable
from .hub import Hub
from .log_file import LogFile
from .notify import keep_alive, notify
from .options import ServeOptions
from .origins import allow_origins
from .paths import PlainPaths
from .plan import ServePlan, make_plan
from .request_log import Observed
from .silence import Silence
from .supervisor import Supervisor
from .workers import Workers

_CLOSE_SECONDS = 1
IDLE_SECONDS = 15  # httpx keeps a connection for 5: one that is closed in that moment loses the next request
_NOT_OURS = (
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
    errno.EINVAL,
)  # what --host names is not an address of this machine
_PROMPTS_AT_ONCE = 4
_SWITCH_SECONDS = 0.0005  # a prompt in the making, in its thread, may hold tokens up for no longer


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: what a signal means is decided in this module."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(PatientProtocol):
    """Bounded in number by what this process may open."""


def serve(options: ServeOptions) -> int:
    """Run until a signal; the exit code. Raises DuovoltError if the server cannot start."""
    plan = make_plan(options)
    _Protocol.most = most_connections()
    sys.setswitchinterval(_SWITCH_SECONDS)
    listener = _listen(options.host, options.port)
    log = None if options.log_requests is None else LogFile(options.log_requests)
    _tell_plan(plan)
    try:
        server = _Server(plan, listener, log)
        code = asyncio.run(server.run())
    finally:
        listener.close()
        if log is not None:
            log.close()
    if server.workers.running:  # a long text is being encoded for nobody: its thread must not meet a dying interpreter
        sys.stderr.flush()
        os._exit(code)
    return code


def _tell_plan(plan: ServePlan) -> None:
    """Before anything is loaded: the cards and their memory, part by part; or why there are none."""
    lines = list(plan.unread)
    if plan.notice:
        lines.append(f"backend auto: reference, because: {plan.notice}")
    if plan.cards is None and (unread := plan.options.asked_of_cards):
        lines.append(f"{', '.join(unread)}: for cards; the {plan.backend.name} backend does not read it.")
    if plan.cards is not None:
        numbers = ", ".join(map(str, dict.fromkeys(plan.cards.numbers)))
        if plan.cards.shared:
            lines.append(
                f"both ranks are on card {numbers}, to try two ranks on one card: slow, since they take turns at it, and "
                "its memory holds both. Serve with a card a rank, or one rank."
            )
        lines.append(f"{f'card {numbers}: ' if numbers else ''}{plan.cards.card}; memory a rank:")
        lines += plan.cards.plan
        if plan.options.prefix_cache:
            lines.append(f"  beside it {plan.options.prefix_cache / 1e9:.3f} GB of the host's memory for kept prefixes")
    if plan.way is not None:
        lines.append(f"between the {'ranks' if plan.cards is not None and plan.cards.shared else 'cards'}: {plan.way}")
    lines.append(f"starts {len(plan.directories)} rank{'s' * (len(plan.directories) > 1)} of {plan.options.ranks}")
    if not plan.options.quiet:
        for line in lines:
            print(f"duovolt serve: {line}", file=sys.stderr, flush=True)


class _Server:
    def __init__(self, plan: ServePlan, listener: socket.socket, log: LogFile | None) -> None:
        self._plan = plan
        self._listener = listener
        self._hub = Hub(plan.options.lanes, plan.options.max_waiting, plan.options.max_wait_seconds)
        self._supervisor = Supervisor(plan, self._hub, self._log_start)
        self.workers = Workers(_PROMPTS_AT_ONCE)
        application = Api(plan, self._hub, self._supervisor, self.workers).application()
        paths = frozenset(route.path for route in application.routes if isinstance(route, Route))
        allowed = allow_origins(application, plan.options.cors_origin)
        config = uvicorn.Config(
            PlainPaths(Observed(allowed, paths, self._hub.meters, log, plan.options.log_content)),
            ssl_certfile=plan.options.tls_cert,
            ssl_keyfile=plan.options.tls_key,
            http=_Protocol,  # whatever else is installed: it bounds the size and the time of a head
            backlog=ACCEPTED_AT_ONCE,
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._http = _HttpServer(config)
        self._signals = 0
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(FileShortage())
        for number in _stopping_signals():
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        ranks = asyncio.create_task(self._supervisor.run())
        stop = asyncio.create_task(self._first_signal.wait())
        alive = asyncio.create_task(keep_alive())
        tokenizer = self._plan.tokenizer
        ready = asyncio.create_task(self.workers.run(prepare, tokenizer.file, tokenizer.size, tokenizer.stop_ids))
        try:
            await asyncio.wait([ranks, http, stop], return_when=asyncio.FIRST_COMPLETED)
            if not ranks.done():
                await self._drain()
        finally:
            self._supervisor.stop()
            self._hub.fail_all(unavailable("the server stopped before the answer was whole", 5))
            self._http.should_exit = True
            stop.cancel()
            ready.cancel()
            await asyncio.gather(ranks, http, stop, ready, return_exceptions=True)
            alive.cancel()
        for task in (ranks, http):
            task.result()  # raises what ended it
        return 0

    async def _drain(self) -> None:
        """No new requests; running answers may finish, for a while or until the second signal."""
        notify("STOPPING=1")
        self._hub.draining = True
        for server in self._http.servers:
            server.close()
        self._listener.close()
        seconds, draining = self._plan.options.drain_seconds, Silence()  # a frozen container's answers make no tokens
        if self._hub.open_count:
            self._say(f"stopping: {self._hub.open_count} answers have {seconds:g} s to finish")
        while self._hub.open_count and draining.look(self) < seconds and not self._second_signal.is_set():
            await asyncio.sleep(0.02)

    def _on_signal(self) -> None:
        (self._second_signal if self._first_signal.is_set() else self._first_signal).set()

    def _log_start(self, facts: dict[str, str]) -> None:
        plan, options = self._plan, self._plan.options
        host, port = self._listener.getsockname()[:2]
        choices = {
            "model": plan.model_id,
            "backend": plan.backend.name,
            "devices": None if plan.cards is None else ",".join(map(str, plan.cards.numbers)) or "cpu",
            "ranks": plan.size,
            "conversion": plan.identity.conversion_id,
            "recipe": plan.identity.recipe,
            "drafts": plan.drafts,
            "drafts_from": options.drafts_from,
            **facts,
            "lanes": options.lanes,
            "max_context": plan.max_context,
            "prefill_chunk": plan.prefill_chunk,
            "max_waiting": options.max_waiting,
            "max_wait_seconds": f"{options.max_wait_seconds:g}",
            "watchdog_seconds": f"{options.watchdog_seconds:g}",
            "log": options.log_requests and ("content" if options.log_content else "requests"),
            "api_keys": len(plan.keys),
        }
        notify("READY=1")
        words = " ".join(f"{name}={value}" for name, value in choices.items() if value is not None)
        scheme = "http" if options.tls_cert is None else "https"
        self._say(f"ready on {scheme}://{f'[{host}]' if ':' in host else host}:{port} {words}")

    def _say(self, text: str) -> None:
        if not self._plan.options.quiet:
            print(f"duovolt serve: {text}", file=sys.stderr, flush=True)


def _stopping_signals() -> list[signal.Signals]:
    """A terminal that closes (SIGHUP) ends a server as Ctrl-C does, unless its owner said otherwise (`nohup`)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything is started.

    Raises InputError for what cannot be an address, EnvironmentFault if the address is not to be had.
    """
    require_host(host, "--host")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # With its protocol named, or asyncio does not know it for TCP and lets the first token wait 40 ms for an ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        no_place = isinstance(error, socket.gaierror) or error.errno in _NOT_OURS
        named = host or "an empty address,"
        remedy = "an address of this machine, such as 127.0.0.1 or ::1, for --host" if no_place else "another --port"
        raise EnvironmentFault(f"cannot listen on {named} port {port}: {error.strerror}; choose {remedy}.") from error
    listener.set_inheritable(False)
    return listener
