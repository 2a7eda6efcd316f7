"""Progress bars for long work: on a terminal only, none with --quiet."""

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
