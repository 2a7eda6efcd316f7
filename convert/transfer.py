"""The bytes of one file over HTTP: range requests from where the partial ends, until its digest is the hub's."""

import contextlib
import re
import socket
import threading
import time
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session

from ..checkpoint.errors import CheckFailed, InputError
from .download_progress import Progress
from .hub import LIBRARY, TRANSIENT, Patience, RemoteFile, Stopped, http, offline, refusal, retry_after
from .localfile import LocalFile

MAX_REDIRECTS = 8
# A connection that brings less than this in a window is as good as dead, though it never times out.
STALL_SECONDS = 60.0
STALL_BYTES = 16 << 10
# Bytes reach the disk in blocks that end at multiples of this, so that the number of writes does not depend on how the
# network cuts them up; a killed run loses less than one block.
WRITE_BYTES = 64 << 10


class _Broken(Exception):
    """This attempt is over; another may do better. Carries the pause that the server asked for."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        super().__init__(problem)
        self.pause = pause


class Sink(Protocol):
    """Where a file's bytes go: a partial on disk, or memory."""

    size: int

    @property
    def complete(self) -> bool: ...

    def append(self, data: bytes) -> None: ...

    def restart(self) -> None: ...

    def digest(self) -> str: ...


class _Memory:
    def __init__(self, remote: RemoteFile) -> None:
        self._remote = remote
        self.restart()

    @property
    def complete(self) -> bool:
        return self.size == self._remote.size

    def append(self, data: bytes) -> None:
        self.content += data
        self._digest.update(data)
        self.size += len(data)

    def restart(self) -> None:
        self.content, self.size, self._digest = bytearray(), 0, self._remote.new_digest()

    def digest(self) -> str:
        return self._digest.hexdigest()


class Transfer:
    """Fetches files for one download; shared by its workers.

    `stop` ends them between two chunks; `abort` also wakes those that wait for bytes.
    """

    def __init__(self, stop: threading.Event, progress: Progress, first_pause: float) -> None:
        self._stop = stop
        self._progress = progress
        self._first_pause = first_pause
        self._open: set[Any] = set()
        self._lock = threading.Lock()

    def fetch(self, local: LocalFile) -> None:
        """Make `local` complete under its final name.

        Raises CheckFailed when the server's bytes have another digest twice, InputError when it refuses, and
        EnvironmentFault when network or disk give up.
        """
        with local.writing() as writer:
            self._complete(local.remote, writer)
            writer.install()

    def read(self, remote: RemoteFile) -> bytes:
        """The content of a small file, checked like every other and kept in memory. Raises as `fetch` does."""
        sink = _Memory(remote)
        self._complete(remote, sink)
        return bytes(sink.content)

    def _complete(self, remote: RemoteFile, sink: Sink) -> None:
        patience = Patience(self._stop, first_seconds=self._first_pause)
        for last in (False, True):
            self._fill(remote, sink, patience)
            found = sink.digest()
            if found == remote.digest:
                return
            self._throw_away(remote, sink, f"its {remote.digest_kind} is {found}, not {remote.digest}", again=not last)
        raise CheckFailed(
            f"{remote.name}: fetched twice, and both times its {remote.digest_kind} is not the listed {remote.digest} "
            f"(last: {found}). The server or a proxy alters the file: use another --endpoint or network."
        )

    def abort(self) -> None:
        """Wake every worker that waits for the network; `stop` is set already."""
        with self._lock:
            streams = list(self._open)
        for stream in streams:
            connection = stream.extensions["network_stream"].get_extra_info("socket")
            with contextlib.suppress(OSError):  # closed in the meantime
                connection.shutdown(socket.SHUT_RDWR)

    def _fill(self, remote: RemoteFile, sink: Sink, patience: Patience) -> None:
        while not sink.complete:
            before = sink.size
            try:
                self._attempt(remote, sink)
            except _Broken as broken:
                problem, pause = str(broken), broken.pause
            except OfflineModeIsEnabled:
                raise offline(remote.name) from None
            except (http.TransportError, http.StreamError) as error:
                problem, pause = f"{type(error).__name__}: {error}", 0.0
            else:
                problem, pause = "the connection ended early", 0.0
            if self._stop.is_set():
                raise Stopped
            if sink.complete:
                return
            if sink.size - before >= STALL_BYTES:
                patience.progress()
            patience.wait(f"{remote.name}: {problem} at byte {sink.size} of {remote.size}", pause)

    def _attempt(self, remote: RemoteFile, sink: Sink) -> None:
        """One request for the rest of the file, through its redirects."""
        url, asked = remote.url, sink.size
        headers = build_hf_headers(library_name=LIBRARY)
        headers["Accept-Encoding"] = "identity"
        if asked:
            headers["Range"] = f"bytes={asked}-"
        token_sent, first_host = "authorization" in headers, _origin(url)
        for _ in range(MAX_REDIRECTS):
            timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
            with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=False) as answer:
                self._check_etag(remote, answer.headers)
                if answer.status_code not in (301, 302, 303, 307, 308):
                    self._body(remote, sink, answer, token_sent and _origin(url) == first_host, first_host)
                    return
                target = _redirect(remote, url, str(answer.headers.get("Location", "")))
            if _origin(target) != _origin(url):
                headers.pop("authorization", None)  # the token is for the hub alone
            url = target
        raise _Broken(f"more than {MAX_REDIRECTS} redirects")

    def _check_etag(self, remote: RemoteFile, headers: Any) -> None:
        """The hub's own answer names the content; a content network's etag means nothing to us."""
        etag = str(headers.get("X-Linked-Etag") or "").removeprefix("W/").strip('"')
        if re.fullmatch(r"[0-9a-f]+", etag) and len(etag) == len(remote.digest) and etag != remote.digest:
            raise InputError(
                f"{remote.name}: the listing gives the digest {remote.digest}, the file's own address "
                f"{etag}: the repository changed or the endpoint mixes revisions. Run the same command again."
            )

    def _body(self, remote: RemoteFile, sink: Sink, answer: Any, token_sent: bool, first_host: str) -> None:
        code, asked, size = answer.status_code, sink.size, remote.size
        if code in TRANSIENT:
            raise _Broken(f"the server answers {code}", retry_after(answer.headers))
        if code == 416:
            self._throw_away(remote, sink, "the server has no such range")
            raise _Broken("the server answers 416 (no such range)")
        if code not in (200, 206):
            if code in (401, 403) and _origin(str(answer.request.url)) != first_host:
                # A content network's address is signed for a while; the hub signs a new one at the next attempt.
                raise _Broken(f"the content server answers {code}")
            raise refusal(code, str(answer.headers.get("X-Error-Code")), remote.name, token_sent)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _Broken("the server sends a compressed body although none was asked for")
        if code == 200 and asked:
            self._throw_away(remote, sink, "the server does not continue files and sends it from the beginning")
        if code == 206:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != asked or match[3] not in ("*", str(size)):
                raise _Broken(f"the server answers another range ({answer.headers.get('Content-Range')})")
        length = answer.headers.get("Content-Length", "")
        if code == 200 and length.isdigit() and int(length) != size:
            raise _Broken(f"the server announces {length} bytes instead of {size}")
        self._receive(remote, sink, answer)

    def _receive(self, remote: RemoteFile, sink: Sink, answer: Any) -> None:
        window, arrived, pending = time.monotonic(), 0, bytearray()
        with self._lock:
            self._open.add(answer)
        try:
            for chunk in answer.iter_raw():
                if self._stop.is_set():
                    raise Stopped
                pending += chunk
                if sink.size + len(pending) > remote.size:
                    pending.clear()
                    self._throw_away(remote, sink, "the server sends more bytes than the file has")
                    raise _Broken("too many bytes")
                whole = (sink.size + len(pending)) // WRITE_BYTES * WRITE_BYTES - sink.size
                if whole > 0:
                    self._store(sink, pending, whole)
                arrived += len(chunk)
                now = time.monotonic()
                if now - window > STALL_SECONDS:
                    if arrived < STALL_BYTES:
                        raise _Broken(f"only {arrived} bytes in {STALL_SECONDS:.0f} s")
                    window, arrived = now, 0
        except (http.TransportError, http.StreamError, _Broken, Stopped):
            self._store(sink, pending, len(pending))
            raise
        else:
            self._store(sink, pending, len(pending))
        finally:
            with self._lock:
                self._open.discard(answer)

    def _store(self, sink: Sink, pending: bytearray, count: int) -> None:
        block = bytes(pending[:count])
        del pending[:count]
        sink.append(block)
        self._progress.advance(count)

    def _throw_away(self, remote: RemoteFile, sink: Sink, why: str, again: bool = True) -> None:
        if sink.size and again:
            self._progress.notice(f"{remote.name}: {why}; {sink.size} bytes thrown away, fetched anew")
        self._progress.advance(-sink.size)
        sink.restart()


def _redirect(remote: RemoteFile, url: str, location: str) -> str:
    """Where `location` leads from `url`. Raises InputError for what is no web address, or gives up encryption."""
    try:
        target = urljoin(url, location)
        http.URL(target)
        usable = urlsplit(target).scheme in ("http", "https") and bool(urlsplit(target).netloc)
    except (ValueError, http.InvalidURL):
        usable = False
    if not usable or (url.startswith("https:") and not target.startswith("https:")):
        # Without its query, which may hold a signature.
        raise InputError(f"{remote.name}: the server redirects to {location.split('?')[0]!r}: not followed.")
    return target


def _origin(url: str) -> str:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}".lower()
