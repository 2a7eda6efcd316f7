"""Errors with an exit code: one message each, saying what was wrong, where, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DuovoltError(Exception):
    """Base of every error meant for the user; the command line prints `duovolt: <message>`."""

    exit_code = 1


class CheckFailed(DuovoltError):
    """A proof or check did not hold (exit code 1)."""

    exit_code = 1


class InputError(DuovoltError):
    """Bad usage or bad input (exit code 2)."""

    exit_code = 2


def without_effect(option: str, why: str) -> InputError:
    """The one message for an option that somebody stated and nothing would read. `option`: as it is written."""
    return InputError(f"{no_effect(option, why)}. Leave it out, or change what stands in its way.")


def no_effect(option: str, why: str) -> str:
    """The same without advice, for what stands where many runs read it: a file, a variable."""
    return f"{option} has no effect here: {why}"


class EnvironmentFault(DuovoltError):
    """The machine cannot do it: disk, memory, GPU, driver, a missing library (exit code 3)."""

    exit_code = 3


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The system's error for a read that fails in mid-file knows no name; give it `path`'s."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def one_line(error: BaseException) -> str:
    """A library's message as one printable line: it may quote what a hostile file holds."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:2000])
