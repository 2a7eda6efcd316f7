"""Progress bars for long work: on a terminal only, none with --quiet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def byte_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes; yields the function that advances it."""
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr,
        disable=quiet or not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        yield lambda count: bar.update(count) and None
