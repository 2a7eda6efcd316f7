"""Where the pictures of a prompt stand: their tokens, and the rotary positions around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..messages import ImageInput


class Pixels(NamedTuple):
    """A picture after resizing, or a group of a video's frames: uint8 RGB, row by row, frame after frame."""

    height: int
    width: int
    data: bytes
    frames: int = 1


@dataclass(frozen=True)
class Placed:
    """A prompt with its pictures. `rope_positions`: three rows (time, height, width), None without pictures.

    `factor`: pixels along the edge of the square that one token stands for.
    """

    ids: list[int]
    images: list[ImageInput]
    rope_positions: list[list[int]] | None
    factor: int = 1

    def index(self, count: int) -> int:
        """Where in `ids` the first `count` tokens end, counted when each picture was a single one."""
        added = 0
        for image in self.images:
            if image.start - added >= count:
                break
            added += (image.height // self.factor) * (image.width // self.factor) - 1
        return count + added


def place(ids: list[int], pictures: Mapping[int, Sequence[Pixels]], factor: int) -> Placed:
    """Give each picture its tokens in the place of one pad; `pictures`: pad -> as many as `ids` has of it, in their order.

    A picture's tokens share one time; their height and width count from it. What follows goes on after the larger of
    its two extents, as the family was trained. A group of frames is placed as a picture is: its time stands in front of it
    as text.
    """
    if not any(pictures.values()):
        return Placed(ids, [], None)
    assert all(ids.count(pad) == len(own) for pad, own in pictures.items()), "one pad a picture"
    waiting = {pad: iter(own) for pad, own in pictures.items()}
    out: list[int] = []
    images: list[ImageInput] = []
    time: list[int] = []
    down: list[int] = []
    across: list[int] = []
    position = 0
    for token in ids:
        if token not in waiting:
            out.append(token)
            for row in (time, down, across):
                row.append(position)
            position += 1
            continue
        height, width, data, frames = next(waiting[token])
        images.append(ImageInput(len(out), height, width, data, frames))
        rows, columns = height // factor, width // factor
        out += [token] * (rows * columns)
        time += [position] * (rows * columns)
        down += [position + row for row in range(rows) for _ in range(columns)]
        across += [position + column for _ in range(rows) for column in range(columns)]
        position += max(rows, columns)
    return Placed(out, images, [time, down, across], factor)
