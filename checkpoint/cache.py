"""Where things are kept that can be made again."""

import os
from pathlib import Path

from .errors import EnvironmentFault


def cache_directory(name: str) -> Path:
    """`$XDG_CACHE_HOME/duovolt/NAME`; a relative value is ignored, as the base directory specification asks.

    Raises EnvironmentFault where the user has no home directory either.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        raise EnvironmentFault(
            "this user has no home directory for the cache: set XDG_CACHE_HOME or HOME to one that can be written."
        ) from None
    return root / "duovolt" / name
