"""The hub as a download sees it: which files a revision holds, how big they are, and what digest proves them.

Metadata calls go through `huggingface_hub` (endpoint, token, proxy and offline rules are the library's); its session
carries our byte requests too.
"""

import importlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from ..checkpoint.address import require_address, require_certificates
from ..checkpoint.download_record import ContentDigest, DigestKind, unusable_name
from ..checkpoint.errors import DuovoltError, EnvironmentFault, InputError

# The library's HTTP client: httpx2 from its version 2 on, httpx before. Both have the classes used here.
http: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])

LIBRARY = "duovolt"
METADATA_TIMEOUT = 30.0  # seconds
LONGEST_WAIT = 300.0  # seconds: a server that asks for a longer pause gets an error message instead
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

Answer = TypeVar("Answer")


class Stopped(Exception):
    """Another worker failed or the user interrupted: leave what is there and end."""


class Patience:
    """Back-off between attempts, bounded: `attempts` failures in a row end it; progress starts the count anew."""

    def __init__(self, stop: threading.Event, attempts: int = 6, first_seconds: float = 0.5) -> None:
        self._stop = stop
        self._attempts = attempts
        self._first_seconds = first_seconds
        self._failures = 0

    def progress(self) -> None:
        """Something arrived since the last failure."""
        self._failures = 0

    def wait(self, problem: str, retry_after: float = 0.0) -> None:
        """Rest before the next attempt, at least `retry_after` seconds. Raises EnvironmentFault when it is the last
        straw, and Stopped when the download is being ended."""
        self._failures += 1
        if retry_after > LONGEST_WAIT:
            raise EnvironmentFault(
                f"{problem}; the server asks to come back in {retry_after:.0f} s. Run the same command again then; "
                "it resumes."
            )
        if self._failures >= self._attempts:
            raise EnvironmentFault(
                f"{problem} ({self._failures} times in a row). Check the network, then run the same command again; "
                "it resumes."
            )
        if self._stop.wait(max(self._first_seconds * 2 ** (self._failures - 1), retry_after)):
            raise Stopped


def retry_after(headers: Any) -> float:
    """Seconds asked for by a Retry-After header in its number form; 0 without one."""
    value = str(headers.get("Retry-After") or "").strip()
    return float(value) if re.fullmatch(r"\d{1,9}", value) else 0.0


@dataclass(frozen=True)
class RemoteFile:
    """One file of a revision. `digest` is also what the hub's etag says; size in bytes."""

    name: str
    size: int
    digest_kind: DigestKind
    digest: str
    url: str

    def new_digest(self) -> ContentDigest:
        return ContentDigest(self.digest_kind, self.size)


@dataclass
class Listing:
    """A repository at one commit. `files` whose digest the listing did not tell are completed by `file`."""

    repo: str
    revision: str
    commit: str
    endpoint: str | None
    files: dict[str, RemoteFile | None]

    def file(self, name: str, patience: Patience) -> RemoteFile:
        """Size and digest of `name`, asked from the server by HEAD where the listing is silent."""
        known = self.files[name]
        if known is None:
            known = self.files[name] = _head(self, name, patience)
        return known


def list_repo(repo: str, revision: str | None, endpoint: str | None, patience: Patience) -> Listing:
    """What `repo` holds at `revision` (default: main), pinned to its commit.

    Raises InputError for a repository, revision or answer that is no good, EnvironmentFault for a network that is not.
    """
    if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
        raise InputError(f"--endpoint {endpoint!r}: give a URL such as https://host.")
    if endpoint is not None:
        require_address(endpoint, "--endpoint")
    require_certificates()
    endpoint = endpoint.rstrip("/") if endpoint else None
    api = HfApi(endpoint=endpoint, library_name=LIBRARY)
    asked = revision or "main"

    def call() -> Any:
        return api.model_info(repo, revision=asked, files_metadata=True, timeout=METADATA_TIMEOUT)

    info = _ask(call, f"{repo} at revision {asked}", patience)
    if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)) or not info.siblings:
        raise InputError(f"{repo}: the server's answer names no commit or no files; is {api.endpoint} a model hub?")
    listing = Listing(repo, asked, info.sha, endpoint, {})
    for sibling in info.siblings:
        name = sibling.rfilename
        if (why := unusable_name(name)) is not None:
            raise InputError(f"{repo}: the server lists the file name {name!r}: {why}. Nothing was written.")
        if name in listing.files:
            raise InputError(f"{repo}: the server lists {name!r} twice.")
        listing.files[name] = _described(listing, sibling)
    return listing


def _described(listing: Listing, sibling: Any) -> RemoteFile | None:
    lfs = sibling.lfs
    size, digest = (lfs.size, lfs.sha256) if lfs else (sibling.size, sibling.blob_id)
    return _remote(listing, sibling.rfilename, size, digest)


def _remote(listing: Listing, name: str, size: Any, digest: Any) -> RemoteFile | None:
    kind: DigestKind
    if re.fullmatch(r"[0-9a-f]{64}", str(digest)):
        kind = "sha256"
    elif re.fullmatch(r"[0-9a-f]{40}", str(digest)):
        kind = "git-sha1"
    else:
        return None
    if not isinstance(size, int) or size < 0:
        return None
    # The library builds URLs for its default endpoint when given none.
    url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=listing.endpoint)
    return RemoteFile(name, size, kind, digest, url)


def _head(listing: Listing, name: str, patience: Patience) -> RemoteFile:
    url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=listing.endpoint)

    def call() -> Any:
        return get_hf_file_metadata(url, timeout=METADATA_TIMEOUT, library_name=LIBRARY, endpoint=listing.endpoint)

    answer = _ask(call, f"{listing.repo}: {name}", patience)
    remote = _remote(listing, name, answer.size, answer.etag)
    if remote is None:
        raise InputError(
            f"{listing.repo}: the server gives no size and content digest for {name} (size {answer.size}, etag "
            f"{answer.etag}); nothing could prove the file. Use another endpoint."
        )
    return remote


def _ask(call: Callable[[], Answer], what: str, patience: Patience) -> Answer:
    """One metadata call with back-off; its failures as ours."""
    while True:
        try:
            return call()
        except HfHubHTTPError as error:
            code = error.response.status_code
            if code not in TRANSIENT:
                sent = "authorization" in error.response.request.headers
                raise refusal(code, str(error.response.headers.get("X-Error-Code")), what, sent) from error
            patience.wait(f"{what}: the server answers {code}", retry_after(error.response.headers))
        except OfflineModeIsEnabled as error:
            raise offline(what) from error
        except http.InvalidURL as error:
            raise InputError(f"{what}: {error}") from error
        except http.TransportError as error:
            patience.wait(f"{what}: {_plain(error)}")
        except ImportError as error:  # a proxy of a kind that needs a library more
            raise EnvironmentFault(f"{what}: the environment's proxy cannot be used: {error}") from error
        except HFValidationError as error:
            raise InputError(f"{what}: not a repository name ({str(error).splitlines()[0]})") from error
        except UnicodeEncodeError as error:  # what goes into the request's head
            raise InputError(
                f"{what}: the token holds a character that is not ASCII; set HF_TOKEN anew or run `hf auth login`."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{what}: the server's answer is not a model hub's ({type(error).__name__}).") from error


def _plain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def offline(what: str) -> DuovoltError:
    """The error for a machine told to stay offline."""
    return EnvironmentFault(f"{what}: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set; unset it to download.")


def refusal(code: int, reason: str, what: str, token_sent: bool) -> InputError:
    """The one message for an answer that trying again will not change."""
    if code in (401, 403) or reason in ("GatedRepo", "RepoNotFound"):
        token = (
            "A token was sent: it may be wrong or lack access; accept the licence on the model's page with its account."
            if token_sent
            else "No token was sent: set HF_TOKEN or run `hf auth login`, and accept the licence on the model's page."
        )
        kind = "gated or private" if code in (401, 403) else "no such repository, or a private one"
        return InputError(f"{what}: {kind} (the server answers {code}). {token}")
    if reason == "RevisionNotFound":
        return InputError(f"{what}: the repository has no such revision.")
    return InputError(f"{what}: the server answers {code}; check the name, the revision and the endpoint.")
