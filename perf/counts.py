"""Counts in files and in servers' words, which may be anything."""

from typing import Annotated

import msgspec

MOST = 1 << 53  # up to which a float holds every whole number

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
