"""Which prompt is read next, and how far."""

from __future__ import annotations

from .lane import Lane

PATIENCE = 3  # chunks of shorter prompts that a prompt lets pass at most


def next_prompt(lanes: list[Lane]) -> Lane:
    """The prompt with the least left to read, unless one has let enough others pass; equals in the order of admission."""
    chosen = min(lanes, key=lambda lane: (lane.passed < PATIENCE, len(lane.request.prompt) - lane.read))
    for lane in lanes:
        lane.passed = 0 if lane is chosen else lane.passed + 1
    return chosen


def chunk_end(lane: Lane, chunk: int, interval: int | None) -> int:
    """Where the lane's next chunk ends: at a multiple of `chunk`, at the prompt's end, or where its state is kept.

    Edges follow from the text and not from where reading begins, so that a prompt whose beginning was kept is read in
    the same chunks, and gets the same bits, as it would be from the start. `interval` None: no state is kept.
    """
    read, length = lane.read, len(lane.request.prompt)
    ends = [length, (read // chunk + 1) * chunk]
    if interval is not None:
        ends += [(read // interval + 1) * interval, *(cut for cut in lane.request.checkpoints if cut > read)]
    return min(ends)
