"""Web addresses as users state them, judged before anything is asked of a network."""

from __future__ import annotations

import os
import ssl
from urllib.parse import SplitResult, urlsplit

from .errors import InputError


def require_address(url: str, option: str) -> SplitResult:
    """The parts of an http or https address. Raises InputError, naming `option`, for one that no server can have."""
    if not url.lower().startswith(("http://", "https://")):
        raise InputError(f"{option} {url}: begin it with http:// or https://.")
    if not url.isprintable() or " " in url:
        raise InputError(f"{option} {url!a}: a space or a control character has no place in an address.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{option} {url}: {error}.") from None
    if not host:
        raise InputError(f"{option} {url}: names no host.")
    require_host(host, f"{option} {url}")
    if port == 0:
        raise InputError(f"{option} {url}: port 0 is nobody's.")
    if "?" in url or "#" in url:
        raise InputError(f"{option} {url}: the address alone, without ? and #.")
    return parts


def require_host(host: str, where: str) -> None:
    """Raises InputError for a name that cannot be asked of any name server: empty or overlong parts."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise InputError(f"{where}: {host!r} is no name of a host (parts of 1 to 63 characters, with dots).") from None


def require_certificates() -> None:
    """Raises InputError if the certificates that the environment names, to be trusted in place of the usual ones, are none."""
    if file := os.environ.get("SSL_CERT_FILE"):
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:
            said = error.strerror or error
            raise InputError(f"SSL_CERT_FILE={file}: {said}; name a PEM file of certificates, or unset it.") from None
