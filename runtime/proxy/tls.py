"""TLS by files: proved to work before anything is started."""

from __future__ import annotations

import ssl
from pathlib import Path

from ...checkpoint.errors import InputError


class _Encrypted(Exception):
    """The key file asks for a password."""


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Prove that a server can use the two files, if any are given.

    Raises InputError if one of the two is missing, cannot be read, is no PEM, is encrypted or belongs to another.
    """
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise InputError(f"{given} is given without {missing}; TLS needs both.")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path.exists() and not path.is_file():
            raise InputError(f"{option} {path}: not a file.")
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(f"{option} {path}: {error.strerror}.") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _ask)
    except _Encrypted as error:
        raise InputError(f"--tls-key {key} is encrypted; give a key without a password.") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"--tls-key {key} is not the key of the certificate {certificate}.") from error
        raise InputError(
            f"--tls-cert {certificate} and --tls-key {key}: not a PEM certificate and its private key "
            f"({error.reason or error})."
        ) from error


def _ask() -> str:
    """In place of the question at the terminal, for which a server would wait without end."""
    raise _Encrypted
