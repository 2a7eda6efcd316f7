"""Names for the beginnings of a text: equal only where every key, value and state after it is equal."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

from ..messages import GenerateRequest
from .pages import PAGE

_DIGEST = 16  # bytes; a client that could make two texts of one name would be answered from another's


class Content:
    """All that a lane's memory of its first tokens follows from: ids, rotary positions, pictures.

    A name is the end of a chain of digests, one for each whole page and one for the rest.
    """

    def __init__(self, request: GenerateRequest) -> None:
        count = len(request.prompt)
        self._tokens = np.array(request.prompt, dtype=np.int64)
        self._offsets = np.zeros((3, count), dtype=np.int64)  # rotary position minus index
        if request.rope_positions is not None:
            self._offsets += np.array(request.rope_positions, dtype=np.int64) - np.arange(count)
        self._pictures = [
            (image.start, blake2b(struct.pack("<QQQ", image.frames, image.height, image.width) + image.pixels).digest())
            for image in request.images
        ]
        self._chain = [b""]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int], rope_delta: int) -> None:
        """Go on with an answer's tokens, whose rotary positions are their indices plus `rope_delta`."""
        self._tokens = np.concatenate((self._tokens, np.array(tokens, dtype=np.int64)))
        added = np.full((3, len(tokens)), rope_delta, dtype=np.int64)
        self._offsets = np.concatenate((self._offsets, added), axis=1)

    def pages(self, count: int) -> bytes:
        """The name of the first `count` whole pages."""
        while len(self._chain) <= count:
            start = (len(self._chain) - 1) * PAGE
            self._chain.append(self._link(self._chain[-1], start, start + PAGE))
        return self._chain[count]

    def name(self, length: int) -> bytes:
        """The name of the first `length` tokens."""
        whole = length // PAGE
        return self._link(self.pages(whole), whole * PAGE, length)

    def _link(self, before: bytes, start: int, stop: int) -> bytes:
        assert stop <= len(self._tokens), f"{stop} tokens of {len(self._tokens)}"
        offsets = self._offsets[:, start:stop]
        pictures = [(at - start, digest) for at, digest in self._pictures if start <= at < stop]
        turned = bool(offsets.any())
        link = blake2b(before, digest_size=_DIGEST)
        link.update(struct.pack("<QQQ", stop - start, turned, len(pictures)))
        link.update(self._tokens[start:stop].tobytes())
        if turned:
            link.update(np.ascontiguousarray(offsets).tobytes())
        for at, digest in pictures:
            link.update(struct.pack("<Q", at) + digest)
        return link.digest()
