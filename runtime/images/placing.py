"""Where the pictures of a prompt stand: their tokens, and the rotary positions around them."""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import ImageInput


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


def place(ids: list[int], pad: int, pictures: list[tuple[int, int, bytes]], factor: int) -> Placed:
    """Give each picture (height, width, pixels) its tokens in the place of one `pad` each; there are as many of both.

    A picture's tokens share one time; their height and width count from it. What follows goes on after the larger of
    its two extents, as the family was trained.
    """
    if not pictures:
        return Placed(ids, [], None)
    assert ids.count(pad) == len(pictures), "one pad a picture"
    waiting = iter(pictures)
    out: list[int] = []
    images: list[ImageInput] = []
    time: list[int] = []
    down: list[int] = []
    across: list[int] = []
    position = 0
    for token in ids:
        if token != pad:
            out.append(token)
            for row in (time, down, across):
                row.append(position)
            position += 1
            continue
        height, width, pixels = next(waiting)
        images.append(ImageInput(len(out), height, width, pixels))
        rows, columns = height // factor, width // factor
        out += [pad] * (rows * columns)
        time += [position] * (rows * columns)
        down += [position + row for row in range(rows) for _ in range(columns)]
        across += [position + column for _ in range(rows) for column in range(columns)]
        position += max(rows, columns)
    return Placed(out, images, [time, down, across], factor)
