"""Fetching a picture or a video that a request names by URL: from public addresses only, bounded in bytes and seconds."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ..images.decoding import MAX_IMAGE_BYTES, ImageFault

FETCH_SECONDS = 10.0  # a URL, its name's lookup included
REQUEST_SECONDS = 30.0  # all URLs of a request
MAX_URL = 2048
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # a gateway's form of IPv4 addresses, private ones included
_STEP = 1 << 16
_LEAST_SECONDS = 0.01

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """False for loopback, link-local, private, multicast and reserved addresses, also wrapped into an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return is_public(inner)
        if address in _TRANSLATED:
            return False
    return address.is_global and not address.is_multicast


class Fetches:
    """What one request has fetched: each URL within `FETCH_SECONDS`, all of them within `REQUEST_SECONDS`, names included."""

    def __init__(self, allowed: Callable[[Address], bool] = is_public) -> None:
        self._allowed = allowed
        self._left = REQUEST_SECONDS

    def fetch(self, url: str) -> bytes:
        """As fetch_image. Raises ImageFault, also if the earlier URLs have left no time."""
        together = f"the URLs of a request have {REQUEST_SECONDS:g} s together"
        if self._left <= 0:
            raise ImageFault(f"not fetched: {together}")
        began = time.monotonic()
        try:
            return fetch_image(url, self._allowed, min(FETCH_SECONDS, self._left))
        except ImageFault as fault:
            if time.monotonic() - began < self._left:
                raise
            raise ImageFault(f"{fault}: {together}") from fault
        finally:
            self._left -= time.monotonic() - began


def fetch_image(url: str, allowed: Callable[[Address], bool], seconds: float) -> bytes:
    """The bytes behind an http or https URL. Raises ImageFault; follows no redirect and asks no proxy.

    The name is resolved once, all its addresses must be `allowed`, and the connection goes to one of these: a name
    cannot answer the check with one address and the connection with another.
    """
    until = time.monotonic() + seconds
    scheme, host, port, target = _parts(url)
    address = _resolve(host, port, allowed, seconds)
    left = max(until - time.monotonic(), _LEAST_SECONDS)
    link: socket.socket | None = None
    late = threading.Event()

    def hang_up() -> None:
        """End every wait on the connection, however slowly the other side drips."""
        late.set()
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def keep_on() -> None:
        if late.is_set():  # while there was no connection to end
            raise TimeoutError

    deadline = threading.Timer(left, hang_up)
    deadline.daemon = True
    deadline.start()
    try:
        link = socket.create_connection((str(address), port), timeout=left / 2)
        keep_on()
        if scheme == "https":
            context = ssl.create_default_context()
            link = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
            keep_on()
            link.do_handshake()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = link
        connection.request("GET", target, headers={"Accept": "image/*, video/*", "Connection": "close"})
        data = _body(connection.getresponse(), host)
        keep_on()  # an end that this side made reads like the other's
        return data
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ImageFault):
            raise
        within = f" within {seconds:.3g} s" if late.is_set() else ""
        raise ImageFault(f"{host} did not give it{within} ({type(error).__name__})") from error
    finally:
        deadline.cancel()
        if link is not None:
            link.close()


def _parts(url: str) -> tuple[str, str, int, str]:
    if len(url) > MAX_URL:
        raise ImageFault(f"a URL of {len(url)} characters, at most {MAX_URL} are read")
    try:
        found = urlsplit(url)
        port = found.port or (443 if found.scheme == "https" else 80)
        host = (found.hostname or "").encode("idna").decode()
    except ValueError as error:  # UnicodeError is one
        raise ImageFault("not a URL") from error
    if not host or found.username is not None or not url.isascii() or any(sign <= " " for sign in url):
        raise ImageFault("not a URL of the form https://HOST/PATH without a user name")
    return found.scheme, host, port, (found.path or "/") + (f"?{found.query}" if found.query else "")


def _resolve(host: str, port: int, allowed: Callable[[Address], bool], seconds: float) -> Address:
    try:
        entries = _look_up(host, port, seconds)
        found = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    except TimeoutError as error:
        raise ImageFault(f"{host} was not found within {seconds:.3g} s") from error
    except (OSError, ValueError) as error:
        raise ImageFault(f"{host} has no address") from error
    for address in found:
        if not allowed(address):
            raise ImageFault(f"{host} is at {address}, which is not a public address")
    if not found:
        raise ImageFault(f"{host} has no address")
    return found[0]


def _look_up(host: str, port: int, seconds: float) -> list[Any]:
    """getaddrinfo's entries. Raises what it raises, TimeoutError after `seconds`.

    The system's resolver cannot be interrupted: it is left to end in a thread of its own, a few times `seconds` later.
    """
    answer: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise found
    return found


def _body(response: http.client.HTTPResponse, host: str) -> bytes:
    if response.status in range(300, 400):
        raise ImageFault(f"{host} answers {response.status}: redirects are not followed; name the picture's own URL")
    if response.status != 200:
        raise ImageFault(f"{host} answers {response.status}")
    parts, size = [], 0
    while part := response.read1(_STEP):
        size += len(part)
        if size > MAX_IMAGE_BYTES:
            raise ImageFault(f"more than {MAX_IMAGE_BYTES} bytes")
        parts.append(part)
    if response.length:
        raise ImageFault(f"{host} broke off {response.length} bytes before the end")
    return b"".join(parts)
