"""Clients that begin a request and never end it are let go; the others are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from duovolt.runtime.proxy.connections import PatientProtocol, most_connections
from duovolt.runtime.proxy.server import IDLE_SECONDS, _listen

from .conftest import Server
from .stub_model import make_ranks, write_script

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


class Impatient(PatientProtocol):
    head_seconds = 0.4


async def slow(request: Request) -> PlainTextResponse:
    await asyncio.sleep(1.0)
    return PlainTextResponse("late")


async def closing_time(port: int, data: bytes, later: bytes = b"") -> tuple[float, bytes]:
    """Seconds until the server closes a connection on which `data` came, `later` 1.5 s after it, and what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if later:
        await asyncio.sleep(1.5)
        writer.write(later)
    began = time.monotonic()
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return time.monotonic() - began, said


def test_half_a_head_is_not_waited_for_and_a_slow_answer_is() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        Starlette(routes=[Route("/", slow)]), http=Impatient, lifespan="off", log_level="error", timeout_keep_alive=5
    )

    async def scene() -> list[tuple[float, bytes]]:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await asyncio.gather(
                closing_time(port, b""),
                closing_time(port, HEAD),
                closing_time(port, HEAD + b"\r\n", HEAD),  # a second head that never ends
                closing_time(port, HEAD + b"Connection: close\r\n\r\n"),
            )
        finally:
            server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    silent, half, second, good = asyncio.run(scene())
    for seconds, said in (silent, half):
        assert 0.3 < seconds < 2 and said == b""
    assert good[1].endswith(b"late") and good[0] > 0.9
    assert second[1].endswith(b"late") and 0.3 < second[0] < 2


def test_a_head_has_its_time_behind_a_pause_of_the_whole_machine() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Starlette(routes=[Route("/", slow)]), http=Impatient, lifespan="off", log_level="error", timeout_keep_alive=5
    )

    async def scene() -> bytes:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(HEAD)
            await asyncio.sleep(0.05)
            time.sleep(1.0)
            await asyncio.sleep(0.02)
            writer.write(b"Connection: close\r\n\r\n")
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    assert asyncio.run(scene()).endswith(b"late")


def test_one_connection_too_many_is_told_and_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    class Few(PatientProtocol):
        most = 2

    config = uvicorn.Config(Starlette(routes=[Route("/", slow)]), http=Few, lifespan="off", log_level="error")

    async def scene() -> tuple[bytes, bytes]:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = (await closing_time(port, HEAD + b"\r\n"))[1]
        held[0][1].close()
        await asyncio.sleep(0.1)
        served = (await closing_time(port, HEAD + b"Connection: close\r\n\r\n"))[1]
        held[1][1].close()
        server.should_exit = True
        await serving
        return refused, served

    refused, served = asyncio.run(scene())
    assert refused.startswith(b"HTTP/1.1 503 ") and b"holds no more connections" in refused
    assert served.endswith(b"late")


@pytest.mark.parametrize(
    ("limits", "most", "files"),
    [
        ((1024, 4096), 4096 - 256, 4096),
        ((1024, resource.RLIM_INFINITY), 65536 - 256, 65536),
        ((1 << 20, 1 << 20), (1 << 20) - 256, 1 << 20),
        ((60, 60), 20, 60),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 65536 - 256, resource.RLIM_INFINITY),
    ],
)
def test_connections_leave_files_to_the_rest(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int, files: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: now.__setitem__(0, wanted))
    assert most_connections() == most
    assert now[0] == (files, limits[1])


def test_ranks_start_again_though_clients_hold_all_they_can(tmp_path: Path) -> None:
    """Before, the loop wrote thousands of lines a second, and no rank started again while the clients stayed."""
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    arguments = [str(make_ranks(tmp_path / "ranks", 2)), "--backend", f"scripted:{script}"]
    if shutil.which("prlimit") is None:
        pytest.skip("no prlimit")
    server = Server(arguments, {}, ["prlimit", "--nofile=100:100"])
    clients: list[socket.socket] = []
    try:
        address = server.wait_ready().url.removeprefix("http://").rpartition(":")
        clients += [socket.create_connection((address[0], int(address[2]))) for _ in range(150)]
        for client in clients:
            with contextlib.suppress(OSError):  # those that were closed
                client.sendall(HEAD)
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        server.wait_log(r"ready on", count=2)
        assert len(server.lines) < 40
    finally:
        for client in clients:
            client.close()
        server.kill()


def test_a_connection_sends_small_pieces_at_once() -> None:
    """asyncio turns Nagle's algorithm off only for sockets whose protocol it is told; with it a kept connection's first
    token waits for the client's delayed ACK, 40 ms."""

    async def options() -> tuple[int, int]:
        listener = _listen("127.0.0.1", 0)
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        server = await asyncio.start_server(accepted, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        option = await asyncio.wait_for(found, 10)
        writer.close()
        server.close()
        return listener.proto, option

    protocol, option = asyncio.run(options())
    assert protocol == socket.IPPROTO_TCP and option != 0


def test_a_connection_outlives_the_official_clients_patience(tmp_path: Path) -> None:
    """They keep one that rests for so long; a server that closes it in that moment loses their next request."""
    patience = httpx.Limits().keepalive_expiry
    assert patience is not None and patience + 5 <= IDLE_SECONDS
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    server = Server([str(make_ranks(tmp_path / "ranks", 1)), "--backend", f"scripted:{script}"], {})
    try:
        port = int(server.wait_ready().url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            for pause in (0.0, patience + 0.5):
                time.sleep(pause)
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}") and (more := connection.recv(1 << 16)):  # head and body may come apart
                    answer += more
                assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")
    finally:
        server.kill()
