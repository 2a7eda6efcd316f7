"""Progress of long work, in bytes or in time: on a terminal only, none with --quiet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes; yields the function that advances it."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm  # a twentieth of a second, for those who see it

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield lambda count: bar.update(count) and None


@contextmanager
def time_bar(label: str, seconds: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar over `seconds`; yields the function that is told how many have passed."""
    if quiet or seconds <= 0 or not sys.stderr.isatty():
        yield lambda passed: None
        return
    from tqdm import tqdm

    form = "{desc}: {n:.0f} of {total:.0f} s |{bar}|"
    with tqdm(total=seconds, desc=label, bar_format=form, mininterval=0, leave=False, file=sys.stderr) as bar:
        yield lambda passed: bar.update(min(passed, seconds) - bar.n) and None
