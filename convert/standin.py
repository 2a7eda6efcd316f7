"""A hub on this machine: serves a local folder as model repositories over real HTTP, with faults on demand.

`ROOT/org/name/...` is the repository `org/name`. It answers what a download needs of the hub's protocol: the model
listing with sizes and digests, `resolve` with HEAD, GET and Range, a relative redirect for git files, and a redirect
of LFS files to a second server (another origin, as the hub's content network is). `duovolt demo` fetches the bundled
model from it; tests add `Fault`s.
"""

import fnmatch
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ..checkpoint.download_record import ContentDigest

LFS = (".safetensors", ".bin", ".gguf", ".pt")
CHUNK = 16 << 10
POINTER_BYTES = 134  # the usual size of a git-lfs pointer

FaultKind = Literal["cut", "whole", "status", "etag", "flip", "slow", "shift", "encoded", "redirect"]


@dataclass
class Fault:
    """Something that goes wrong with requests to one server for files that match `name`.

    kind: `cut` closes the connection after `value` body bytes; `whole` answers 200 with everything to a range request;
    `status` answers the code `value` (with `text` as Retry-After, if given); `etag` announces another etag; `flip`
    turns one bit at the file's byte `value`; `slow` rests `value` milliseconds after every 16 KiB; `shift` begins the
    range `value` bytes too late; `encoded` claims a compressed body; `redirect` sends the client to `text`.
    times: how often it strikes; None means always. The file name of the listing call is `api`.
    """

    kind: FaultKind
    name: str = "*"
    value: int = 0
    text: str = ""
    times: int | None = 1
    server: Literal["hub", "cdn"] = "cdn"


@dataclass
class Served:
    """One request, logged when it arrives; `status` and `body_bytes` (what really went out) follow the answer."""

    server: str
    method: str
    name: str
    range: str | None
    authorization: str | None
    status: int = 0
    body_bytes: int = 0


@dataclass(frozen=True)
class _Blob:
    path: Path
    size: int
    sha256: str
    git_sha1: str
    lfs: bool

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1


@dataclass
class HubStandIn:
    """Serves `root` while the context is open; `url` is the endpoint to give to a download.

    token: when set, every hub request must carry it, as for a gated repository. edit_listing: changes the listing
    before it is sent. log: every answered request, oldest first.
    """

    root: Path
    token: str | None = None
    edit_listing: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    faults: list[Fault] = field(default_factory=list)
    log: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[tuple[Path, int, int], _Blob] = {}
        self._hub = _Server(self, "hub")
        self._cdn = _Server(self, "cdn")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_address[1]}"

    @property
    def cdn_url(self) -> str:
        """Another host by name too: clients tell the hub from its content network by that."""
        return f"http://localhost:{self._cdn.server_address[1]}"

    def __enter__(self) -> "HubStandIn":
        for server in (self._hub, self._cdn):
            # A short poll: closing the stand-in must not hold up whoever used it.
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()

    def bytes_served(self, name: str = "*") -> int:
        """Body bytes sent for files that match `name`, on both servers."""
        with self._lock:
            return sum(served.body_bytes for served in self.log if fnmatch.fnmatchcase(served.name, name))

    def requests(self, name: str = "*", server: str | None = None) -> list[Served]:
        """The log's entries for files that match `name`."""
        with self._lock:
            return [s for s in self.log if fnmatch.fnmatchcase(s.name, name) and server in (None, s.server)]

    def commit(self, repo: str) -> str:
        """The revision of the repository as it stands: a digest of names and contents, 40 hex digits."""
        lines = [f"{name} {blob.etag}\n" for name, blob in self.files(repo).items()]
        return hashlib.sha1("".join(lines).encode()).hexdigest()

    def files(self, repo: str) -> dict[str, "_Blob"]:
        """Name to content of a repository; KeyError when there is none."""
        folder = self.root / repo
        if repo.count("/") != 1 or ".." in repo or not folder.is_dir():
            raise KeyError(repo)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): self._blob(path) for path in paths}

    def _blob(self, path: Path) -> "_Blob":
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._blobs:
            sha256, git_sha1 = ContentDigest("sha256", status.st_size), ContentDigest("git-sha1", status.st_size)
            for block in _blocks(path, 0, status.st_size):
                sha256.update(block)
                git_sha1.update(block)
            lfs = path.suffix in LFS
            self._blobs[key] = _Blob(path, status.st_size, sha256.hexdigest(), git_sha1.hexdigest(), lfs)
        return self._blobs[key]

    def take_fault(self, server: str, name: str, kinds: tuple[FaultKind, ...]) -> Fault | None:
        """The first fault in force for this request, counted down."""
        with self._lock:
            for fault in self.faults:
                if fault.server != server or fault.kind not in kinds or fault.times == 0:
                    continue
                if fnmatch.fnmatchcase(name, fault.name):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def record(self, served: Served) -> None:
        with self._lock:
            self.log.append(served)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, standin: HubStandIn, role: Literal["hub", "cdn"]) -> None:
        self.standin = standin
        self.role = role
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away (a killed download) is nothing to print about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Requests are kept in `HubStandIn.log`, not printed."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        # Where repository, revision and file stand in the path, and who answers.
        answer: Callable[[str, str], None] | None = None
        if self.server.role == "cdn":
            repo, revision, self.name, answer = parts[:2], parts[2:3], "/".join(parts[3:]), self._cdn_file
        elif parts[:3] == ["api", "resolve-cache", "models"]:
            repo, revision, self.name, answer = parts[3:5], parts[5:6], "/".join(parts[6:]), self._git_file
        elif parts[:2] == ["api", "models"]:
            repo, revision, self.name = parts[2:4], parts[5:6], "api"
            answer = self._tree if parts[4:5] == ["tree"] else self._listing
        else:
            repo, revision, self.name = parts[:2], parts[3:4], "/".join(parts[4:])
            answer = self._resolve if parts[2:3] == ["resolve"] else None
        auth, wanted = self.headers.get("Authorization"), self.headers.get("Range")
        self.served = Served(self.server.role, self.command, self.name, wanted, auth)
        self.server.standin.record(self.served)
        if answer is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._checked("/".join(repo), (revision or ["main"])[0], answer)

    def _checked(self, repo: str, revision: str, answer: Callable[[str, str], None]) -> None:
        """Refuse what the hub would refuse (token, repository, revision), else `answer(repo, commit)`."""
        standin = self.server.standin
        fault = standin.take_fault(self.server.role, self.name, ("status", "redirect"))
        if fault is not None and fault.kind == "redirect":
            self._headers(302, 0, {"Location": fault.text})
            return
        if fault is not None:
            self._refuse(fault.value, "", fault.text)
            return
        gated = standin.token is not None and self.server.role == "hub"
        if gated and self.headers.get("Authorization") != f"Bearer {standin.token}":
            self._refuse(401 if self.headers.get("Authorization") is None else 403, "GatedRepo")
            return
        try:
            commit = standin.commit(repo)
        except KeyError:
            self._refuse(404, "RepoNotFound")
            return
        if revision not in ("main", commit):
            self._refuse(404, "RevisionNotFound")
            return
        answer(repo, commit)

    def _listing(self, repo: str, commit: str) -> None:
        siblings: list[dict[str, Any]] = []
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        for name, blob in self.server.standin.files(repo).items():
            entry: dict[str, Any] = {"rfilename": name}
            if blobs:
                entry |= {"size": blob.size, "blobId": blob.git_sha1}
                if blob.lfs:
                    entry["lfs"] = {"size": blob.size, "sha256": blob.sha256, "pointerSize": POINTER_BYTES}
            siblings.append(entry)
        listing = {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings}
        if self.server.standin.edit_listing is not None:
            listing = self.server.standin.edit_listing(listing)
        self._json(listing)

    def _tree(self, repo: str, commit: str) -> None:
        """The other form of the listing: files only, folders are implied."""
        entries: list[dict[str, Any]] = []
        for name, blob in self.server.standin.files(repo).items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": blob.size, "oid": blob.git_sha1}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": POINTER_BYTES}
            entries.append(entry)
        self._json(entries)

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._headers(200, len(body), {"Content-Type": "application/json"})
        self._send(body)

    def _resolve(self, repo: str, commit: str) -> None:
        blob = self.server.standin.files(repo).get(self.name)
        if blob is None:
            self._refuse(404, "EntryNotFound")
            return
        etag = self._etag(blob)
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(blob.size), "X-Linked-Etag": etag, "ETag": etag}
        place = f"{repo}/{commit}/{quote(self.name)}"
        if blob.lfs:
            self._headers(302, 0, headers | {"Location": f"{self.server.standin.cdn_url}/{place}?signature=1"})
        else:
            self._headers(307, 0, headers | {"Location": f"/api/resolve-cache/models/{place}"})

    def _git_file(self, repo: str, commit: str) -> None:
        blob = self.server.standin.files(repo).get(self.name)
        if blob is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._content(blob, {"X-Repo-Commit": commit, "ETag": self._etag(blob)})

    def _cdn_file(self, repo: str, commit: str) -> None:
        blob = self.server.standin.files(repo).get(self.name)
        if blob is None:
            self._refuse(404, "")
        else:
            self._content(blob, {"ETag": f'"{hashlib.md5(blob.etag.encode()).hexdigest()}"'})

    def _content(self, blob: "_Blob", headers: dict[str, str]) -> None:
        kinds: tuple[FaultKind, ...] = ("cut", "whole", "flip", "slow", "shift", "encoded")
        fault = self.server.standin.take_fault(self.server.role, self.name, kinds)
        kind = fault.kind if fault else None
        begin = self._range_begin(blob.size) if kind != "whole" else 0
        if begin is None:
            self._headers(416, 0, {"Content-Range": f"bytes */{blob.size}"})
            return
        if kind == "encoded":
            headers["Content-Encoding"] = "gzip"
        if kind == "shift" and fault:
            begin += fault.value
        code = 206 if self.headers.get("Range") and kind != "whole" else 200
        if code == 206:
            headers["Content-Range"] = f"bytes {begin}-{blob.size - 1}/{blob.size}"
        self._headers(code, blob.size - begin, headers | {"Accept-Ranges": "bytes"})
        if self.command == "GET":
            self._stream(blob, begin, fault)

    def _stream(self, blob: "_Blob", begin: int, fault: Fault | None) -> None:
        position = begin
        end = min(blob.size, begin + fault.value) if fault and fault.kind == "cut" else blob.size
        for block in _blocks(blob.path, begin, end):
            if fault and fault.kind == "flip" and position <= fault.value < position + len(block):
                changed = bytearray(block)
                changed[fault.value - position] ^= 1
                block = bytes(changed)
            self._send(block)
            position += len(block)
            if fault and fault.kind == "slow":
                time.sleep(fault.value / 1000)
        if position < blob.size:
            self.close_connection = True

    def _range_begin(self, size: int) -> int | None:
        """First byte wanted by `Range: bytes=N-`; None when it lies beyond the file."""
        wanted = self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        return begin if begin < size or (begin == 0 and not wanted) else None

    def _etag(self, blob: "_Blob") -> str:
        fault = self.server.standin.take_fault("hub", self.name, ("etag",))
        return f'"{blob.etag if fault is None else "0" * len(blob.etag)}"'

    def _refuse(self, code: int, error: str, retry_after: str = "") -> None:
        headers = {"X-Error-Code": error} if error else {}
        if retry_after:
            headers["Retry-After"] = retry_after
        self._headers(code, 0, headers)

    def _headers(self, code: int, length: int, headers: dict[str, str]) -> None:
        self.served.status = code
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.served.body_bytes += len(data)


def _blocks(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as handle:
        handle.seek(begin)
        while begin < end and (block := handle.read(min(CHUNK, end - begin))):
            begin += len(block)
            yield block
