"""One generation of rank processes: started together, checked against one another, and gone together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ...checkpoint.errors import DuovoltError, EnvironmentFault
from ..messages import CancelRequest, GenerateRequest, StepRecord, TokenEvent
from ..parallel.faults import DOORS, of_start
from ..parallel.lockstep import last_record
from ..parallel.owner import owned_name, owner_is_dead
from ..parallel.region import ProgressCounter, Region, region_bytes
from ..parallel.shared import SharedFile, sweep_dead
from ..rank.options import RankOptions
from ..rank.wire import Failed, Hello, Ready, Step, Stop, ToProxy, decode_to_proxy, encode
from .load_watch import LoadWatch
from .plan import ServePlan
from .silence import Silence

_STOP_SECONDS = 0.7  # for a rank to end by itself, or to print its side of a failure; then it is killed
_KILL_SECONDS = 20.0  # for a killed one to be gone: a card takes its time to give memory back
_LOADING_NEWS_SECONDS = 5.0
_LOADING_LOOK_SECONDS = 0.5
_LONGEST_LOAD_SECONDS = 3600.0  # the largest model of the family from a slow disk takes a tenth of it
# What the ranks say of their engines must be the same where it decides what a step does.
_AGREED_FACTS = (
    "kv",
    "kv_pages",
    "prefix_cache",
    "attention",
    "head_split",
    "draft_head",
    "draft_window",
    "collective",
    "graphs",
    "delta",
    "prompts",
)
_READABLE = int(zmq.POLLIN)  # the plain number: arithmetic of flags costs more than the question


class RankFault(DuovoltError):
    """A rank died, hung, or disagreed. `exit_code` is the rank's own where it said one."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankView:
    """One rank at this moment: turns of its loop, values cut to fp16's largest, lockstep records given, and the last of them."""

    number: int
    pid: int
    steps: int
    busy: bool
    age_seconds: float
    overflows: int
    records: int
    record: StepRecord | None


class RankGroup:
    """`fault` is set when any rank fails; `relay` gets the events of each step once all ranks have given the same.

    start   which start of ranks this is, from 0
    """

    def __init__(self, plan: ServePlan, relay: Callable[[list[TokenEvent]], None], start: int) -> None:
        self._plan = plan
        self._relay = relay
        self._start = start
        # One for all generations: where files run out, the library cannot make another.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._processes: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._steps: list[deque[Step]] = [deque() for _ in range(plan.size)]
        self._hellos: dict[int, Hello] = {}
        self._ready: dict[int, Ready] = {}
        self._all_ready = asyncio.Event()
        self._folder: Path | None = None
        self._shared: SharedFile | None = None
        self._progress: list[ProgressCounter] = []
        self._silences = [Silence() for _ in range(plan.size)]
        self.fault: asyncio.Future[RankFault] = self._loop.create_future()

    async def start(self) -> None:
        """Start the processes and wait until all are ready. Raises RankFault, EnvironmentFault or OSError."""
        sweep_dead()
        self._shared = SharedFile.create(region_bytes())
        region = Region(self._shared.memory)
        self._progress = [ProgressCounter(region, rank) for rank in range(self._plan.size)]
        self._folder = _private_folder()
        for rank in range(self._plan.size):
            self._open_socket(rank)
            self._processes.append(await self._spawn(rank))
            self._tasks.append(asyncio.create_task(self._watch_exit(rank)))
        await self._wait_ready()
        self._check_ready()

    def send(self, message: GenerateRequest | CancelRequest | Stop) -> None:
        """The same bytes to every rank, in the same order."""
        data = encode(message)
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send(data, zmq.NOBLOCK)
            except zmq.ZMQError:
                if not isinstance(message, Stop):
                    self._set_fault(RankFault(f"rank {rank} takes no more messages."))
            self._loop.call_soon(self._drain, rank)  # sending may have swallowed the news of a message to read

    def facts(self) -> dict[str, str]:
        """What rank 0 said of its engine."""
        return self._ready[0].facts

    def step_age(self) -> float:
        """Seconds since the slower rank's last sign of life; idle ranks give one twice a second."""
        return max(progress.age_seconds for progress in self._progress)

    def silence(self) -> float:
        """As `step_age`, without the times in which this process stood still: it may go on before its ranks do."""
        return max(self._silence(rank) for rank in range(self._plan.size))

    def _silence(self, rank: int) -> float:
        return self._silences[rank].look(self._progress[rank].steps)

    @property
    def busy(self) -> bool:
        """True if any rank has an answer to make."""
        return any(progress.busy for progress in self._progress)

    def views(self) -> list[RankView]:
        """Each rank as its words in the shared file show it: nobody is asked."""
        assert self._shared is not None
        views = []
        region = Region(self._shared.memory)
        for rank, progress in enumerate(self._progress):
            records, record = last_record(region, rank)
            pid = self._processes[rank].pid
            steps, busy, age = progress.steps, progress.busy, progress.age_seconds
            views.append(RankView(rank, pid, steps, busy, age, progress.overflows, records, record))
        return views

    async def stop(self) -> None:
        """Ask, wait a moment, kill; then nothing of this generation is left: process, file, socket or folder.

        But for a process that a driver holds and that no signal reaches: it is named, and not waited for any longer.
        """
        self.send(Stop())
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        if waits:
            await asyncio.wait(waits, timeout=_STOP_SECONDS)
        self.kill()
        if waits:
            _, held = await asyncio.wait(waits, timeout=_KILL_SECONDS)
            for process, wait in zip(self._processes, waits, strict=True):
                if wait in held:
                    wait.cancel()
                    print(
                        f"duovolt serve: rank process {process.pid} cannot be killed: its driver holds it.",
                        file=sys.stderr,
                    )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            self._loop.remove_reader(socket.fileno())
            socket.close()
        self._clear_names()
        sweep_dead()  # what a killed rank had made for itself and its twin
        self._shared, self._progress = None, []  # the last mapping goes with them: the next generation needs the room

    def kill(self) -> None:
        """SIGKILL to what still runs: a rank in a wait of its own does not listen."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _open_socket(self, rank: int) -> None:
        try:
            socket = self._context.socket(zmq.PAIR)
            self._sockets.append(socket)
            socket.linger = 0
            socket.sndhwm = 0  # the hub bounds what may wait here, whatever a rank is doing
            socket.bind(self._endpoint(rank))
        except zmq.ZMQError as error:  # no more open files, no room for its name
            raise EnvironmentFault(f"cannot open a socket for rank {rank}: {error.strerror or error}.") from error
        self._loop.add_reader(socket.fileno(), self._drain, rank)

    async def _spawn(self, rank: int) -> asyncio.subprocess.Process:
        plan = self._plan
        assert self._shared is not None
        options = RankOptions(
            dir=plan.directories[rank].absolute(),
            rank=rank,
            size=plan.size,
            endpoint=self._endpoint(rank),
            shared=self._shared.name,
            parent=os.getpid(),
            backend=plan.backend.argument,
            max_context=plan.max_context,
            lanes=plan.options.lanes,
            drafts=plan.drafts,
            draft_head=plan.options.draft_head,
            drafts_from=None if plan.options.drafts_from is None else plan.options.drafts_from.absolute(),
            prefill_chunk=plan.prefill_chunk,
            prefix_bytes=plan.options.prefix_cache,
            prefix_interval=plan.options.prefix_interval,
            sampleable=plan.tokenizer.size,
            exchange_seconds=plan.exchange_seconds,
            ends=",".join(map(str, plan.tokenizer.stop_ids)),
            kv=plan.options.kv,
            attention=plan.options.attention,
            head_split=plan.options.head_split,
            graphs=plan.options.graphs,
            delta=plan.options.delta,
            draft_window=plan.options.draft_window,
            collective="" if plan.way is None else plan.way.argument,
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one thread a rank: a pool would only fight the twin
        if (cards := plan.cards) is not None:
            options = replace(options, pages=cards.pages, plain_bytes=cards.kept)
            if cards.uuids:  # every rank sees all the cards in use, and no others, in rank order: peers must be visible
                environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(cards.visible)}
                options = replace(
                    options, device=f"cuda:{cards.place(rank)}", cpus=",".join(map(str, cards.near[rank]))
                )
        for door in DOORS:  # a door opens once: the restarted ranks must be able to serve
            environment.pop(door, None)
            if ordered := of_start(door, self._start):
                environment[door] = ordered
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "duovolt",
            "rank",
            *options.arguments(),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the proxy alone, which decides what it means
        )

    def _endpoint(self, rank: int) -> str:
        return f"ipc://{self._folder}/rank-{rank}"

    async def _wait_ready(self) -> None:
        ready = asyncio.ensure_future(self._all_ready.wait())
        either: list[asyncio.Future[Any]] = [ready, self.fault]
        start = news = time.monotonic()
        watch = LoadWatch([process.pid for process in self._processes])
        while True:
            done, _ = await asyncio.wait(either, timeout=_LOADING_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self.fault.done():
                ready.cancel()
                raise self.fault.result()
            if done:
                return
            now = time.monotonic()
            self._look_at_loading(watch, now - start)
            if now - news >= _LOADING_NEWS_SECONDS and not self._plan.options.quiet:
                news = now
                waiting = ", ".join(str(rank) for rank in range(self._plan.size) if rank not in self._ready)
                print(f"duovolt serve: loading for {now - start:.0f} s, waiting for rank {waiting}", file=sys.stderr)

    def _look_at_loading(self, watch: LoadWatch, seconds: float) -> None:
        """A rank that does nothing for the watchdog's time, or loads for ever, is taken to hang.

        One that is ready idles, and gives signs of life of its own.
        """
        for rank, process in enumerate(self._processes):
            loaded = rank in self._ready
            silent = self._silence(rank) if loaded else watch.look(process.pid)
            if silent > self._plan.options.watchdog_seconds:
                self._set_fault(RankFault(f"rank {rank} has done nothing for {silent:.0f} s while the ranks load."))
            if not loaded and seconds > _LONGEST_LOAD_SECONDS:
                self._set_fault(RankFault(f"rank {rank} was not ready after {seconds:.0f} s."))

    def _check_ready(self) -> None:
        """Raises RankFault if a hello came from a stranger, or if the ranks' engines are not alike."""
        for rank, process in enumerate(self._processes):
            if (found := self._hellos[rank].pid) != process.pid:
                raise RankFault(f"rank {rank} is process {found}, not {process.pid}, which was started as it.")
            for name in _AGREED_FACTS:
                first, other = self._ready[0].facts.get(name), self._ready[rank].facts.get(name)
                if first != other:
                    raise RankFault(f"the ranks differ in {name}: rank 0 has {first}, rank {rank} has {other}.", 2)

    def _drain(self, rank: int) -> None:
        """Take every message that has come: the library's descriptor tells of the first only.

        Plain calls in place of the library's own asyncio sockets, whose futures cost more than all else a token costs.
        """
        socket = self._sockets[rank]
        while not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
            try:
                message = decode_to_proxy(socket.recv(zmq.NOBLOCK))
            except msgspec.DecodeError as error:
                self._set_fault(RankFault(f"rank {rank} sent what is no message of a rank: {error}."))
                continue
            self._take(rank, message)

    def _take(self, rank: int, message: ToProxy) -> None:
        match message:
            case Hello() | Ready() if rank in (self._hellos if isinstance(message, Hello) else self._ready):
                self._set_fault(RankFault(f"rank {rank} has started twice."))
            case Hello():
                self._check_hello(rank, message)
            case Ready():
                self._ready[rank] = message
                if len(self._ready) == self._plan.size:
                    self._all_ready.set()
            case Step():
                self._steps[rank].append(message)
                self._match_steps()
            case Failed():
                self._set_fault(RankFault(f"rank {rank}: {message.message}", message.exit_code))

    def _check_hello(self, rank: int, hello: Hello) -> None:
        expected = self._plan.identity
        self._hellos[rank] = hello
        first = next(iter(self._hellos.values()))
        pairs = {
            "rank": (hello.rank, rank),
            "size": (hello.size, self._plan.size),
            "conversion id": (hello.conversion_id, expected.conversion_id),
            "recipe": (hello.recipe, expected.recipe),
            "tokenizer": (hello.tokenizer_digest, expected.tokenizer_digest),
            "configuration": (hello.config_digest, expected.config_digest),
            "versions": (hello.versions, first.versions),
            "backend": (hello.backend, self._plan.backend.argument),
        }
        for what, (found, wanted) in pairs.items():
            if found != wanted:
                self._set_fault(RankFault(f"rank {rank} refused: its {what} is {found}, expected {wanted}.", 2))
                return
        if len(self._hellos) == self._plan.size:
            self._clear_names()  # both sides have mapped and connected: from now on nothing has a name to leave behind

    def _match_steps(self) -> None:
        """Relay rank 0's events when every rank has given the same tokens for the same requests.

        Nothing behind a fault: what has piled up in the sockets is read before anybody ends the ranks.
        """
        while all(self._steps) and not self.fault.done():
            heads = [steps.popleft() for steps in self._steps]
            views = [
                (step.sequence, [(event.request_id, event.tokens, event.finish_reason) for event in step.events])
                for step in heads
            ]
            if any(view != views[0] for view in views):
                text = "; ".join(f"rank {rank}: {view}" for rank, view in enumerate(views))
                print(f"TP2 LOCKSTEP FAILURE: the ranks gave different tokens\n  {text}", file=sys.stderr, flush=True)
                self._set_fault(RankFault("the ranks gave different tokens"))
                return
            self._relay(heads[0].events)

    async def _watch_exit(self, rank: int) -> None:
        code = await self._processes[rank].wait()
        await asyncio.sleep(0.05)  # its last message may still be on its way
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._set_fault(RankFault(f"rank {rank} {ending}."))

    def report_hang(self, seconds: float) -> None:
        """The watchdog's verdict."""
        self._set_fault(RankFault(f"no step for {seconds:.0f} s; the ranks are taken to hang."))

    def _set_fault(self, fault: RankFault) -> None:
        if not self.fault.done():
            self.fault.set_result(fault)

    def _clear_names(self) -> None:
        if self._shared is not None:
            self._shared.unlink()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    """A folder of mode 0700 for the sockets, with a short path; those of dead owners are removed."""
    for base in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")):
        parent = Path(base)
        if not os.access(parent, os.W_OK | os.X_OK) or len(base) > 60:  # a socket's path has at most 107 bytes
            continue
        for child in parent.glob("duovolt-*"):
            with contextlib.suppress(FileNotFoundError):  # another server sweeps, too
                if owner_is_dead(child.name) and child.is_dir() and child.stat().st_uid == os.geteuid():
                    shutil.rmtree(child, ignore_errors=True)
        folder = parent / owned_name()
        try:
            folder.mkdir(mode=0o700)
        except OSError:  # full: there may be room in the next
            continue
        return folder
    raise EnvironmentFault("no writable folder with a short path and room for the sockets; set TMPDIR to one.")
