"""HTTP clients of a server that a user names by its address, as a terminal's chat, benches and evaluations need them."""

from __future__ import annotations

import ipaddress

import httpx

from ...checkpoint.address import require_address, require_certificates
from ...checkpoint.errors import EnvironmentFault, InputError, one_line

_NO_FIRST_LINE = ("without sending a response", "illegal status line", "illegal request line")  # h11's words


def reach(url: str, headers: dict[str, str], timeout: httpx.Timeout, proxies: bool) -> httpx.Client:
    """A client whose paths count from `url`, with or without its `/v1`.

    Certificates are those that the environment names (SSL_CERT_FILE, SSL_CERT_DIR), else the usual ones. With `proxies`
    the environment's proxy is asked for what is not this machine: nobody's proxy knows who listens here.
    Raises InputError for an address that is none and for what the environment names in vain.
    """
    parts = require_address(url, "--url")
    try:
        address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise InputError(f"--url {url}: {error}.") from None
    require_certificates()
    asked = proxies and not _is_here(parts.hostname or "")
    try:
        return httpx.Client(
            base_url=address, headers=headers, timeout=timeout, verify=httpx.create_ssl_context(), trust_env=asked
        )
    except ImportError as error:
        raise InputError(f"the environment's proxy is not one that this can use: {error}") from None
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"the environment's proxy: {error}.") from None


def unreachable(url: str, error: httpx.TransportError, advice: str = "") -> EnvironmentFault:
    """Why no connection came about: nobody listens, or what listens does not speak TLS, or has a certificate of its own."""
    said = one_line(error)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return EnvironmentFault(
            f"{url}: its certificate is not trusted ({said}); name it, or who issued it, in SSL_CERT_FILE."
        )
    if "[SSL" in said:
        return EnvironmentFault(f"{url}: what listens there does not speak TLS as this does ({said}); is it http://?")
    return EnvironmentFault(f"no server at {url} ({said}){advice}.")


def wants_tls(url: str, error: httpx.HTTPError) -> bool:
    """Whether a server that was asked in plain text may be one of TLS: they hang up, or say so in TLS."""
    first = any(words in str(error) for words in _NO_FIRST_LINE)
    return url.lower().startswith("http://") and isinstance(error, httpx.RemoteProtocolError) and first


def _is_here(host: str) -> bool:
    """Whether it is this machine: 0.0.0.0 and ::, which a server may be told to listen on, lead there, too."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".").rpartition(".")[2] == "localhost"
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified
