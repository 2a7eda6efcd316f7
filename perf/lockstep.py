"""What a lockstep record costs: two processes agree as ranks do, and each round is timed from the later rank's arrival.

`python -m duovolt.perf.lockstep` prints the table of docs/reliability.md. No card is needed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from ..runtime.messages import StepRecord
from ..runtime.parallel.lockstep import SharedLockstep
from ..runtime.parallel.region import Region, region_bytes
from ..runtime.parallel.shared import SharedFile
from ..runtime.parallel.waiting import sharpen_naps

_WARM_UP = 200
_TIMEOUT_SECONDS = 20.0
_SEED = 5


@dataclass(frozen=True)
class LockstepCost:
    """Microseconds of one record beyond the wait for the later rank: medians and 99th percentiles over the rounds.

    `skew_us`: the later rank (each in turn) comes up to so much later. `own_us`: what it costs the later rank, which finds
    its twin's record there; `other_us`: what passes until the earlier rank, which waits, has it too.
    """

    skew_us: int
    rounds: int
    own_us: float
    own_p99_us: float
    other_us: float
    other_p99_us: float


def measure_lockstep(skew_us: int, rounds: int = 2000) -> LockstepCost:
    """Run two ranks as processes of their own. Raises what the exchange raises."""
    context = multiprocessing.get_context("spawn")
    shared = SharedFile.create(region_bytes())
    try:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=_run_rank, args=(shared.name, rank, skew_us, rounds, pipes[rank][1]), daemon=True)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for _, written in pipes:
            written.close()  # a rank that dies ends its pipe
        times = [pipe.recv() for pipe, _ in pipes]  # float64 [rounds, 2]: arrival and return, each rank
        for rank in ranks:
            rank.join()
    finally:
        shared.unlink()
    arrivals, returns = (np.stack([of_rank[:, column] for of_rank in times]) for column in range(2))
    last = arrivals.argmax(axis=0)
    cost = 1e6 * (returns - arrivals.max(axis=0))  # [2, rounds]
    own, other = (np.take_along_axis(cost, index[None], axis=0)[0] for index in (last, 1 - last))
    return LockstepCost(
        skew_us,
        rounds,
        *(float(x) for x in (np.median(own), np.quantile(own, 0.99), np.median(other), np.quantile(other, 0.99))),
    )


def _run_rank(name: str, rank: int, skew_us: int, rounds: int, pipe: Connection) -> None:
    sharpen_naps()
    lockstep = SharedLockstep(Region(SharedFile.attach(name).memory), rank, _TIMEOUT_SECONDS)
    late = np.random.default_rng(_SEED).uniform(-skew_us, skew_us, _WARM_UP + rounds) / 1e6  # alike on both
    times = np.empty((rounds, 2))
    for number in range(-_WARM_UP, rounds):
        _pause(max(0.0, late[number + _WARM_UP] * (1 if rank else -1)))
        record = StepRecord("round", 4, number % 2**32, number % 2**20, 100, 0)
        arrival = time.monotonic()
        lockstep.agree(record, number % 2**32, 0)
        if number >= 0:
            times[number] = arrival, time.monotonic()
    pipe.send(times)


def _pause(seconds: float) -> None:
    """Work, not sleep: a rank that computes keeps its core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        continue


def table(costs: list[LockstepCost]) -> str:
    """The table of docs/reliability.md."""
    lines = [
        "| one rank later by up to | later rank, median | p99 | earlier rank, median | p99 |",
        "|---|---|---|---|---|",
    ]
    for cost in costs:
        figures = (cost.own_us, cost.own_p99_us, cost.other_us, cost.other_p99_us)
        lines.append(f"| {cost.skew_us} us | " + " | ".join(f"{figure:.1f} us" for figure in figures) + " |")
    return "\n".join(lines)


def main() -> None:
    costs = [measure_lockstep(skew) for skew in (0, 50, 500, 5000)]
    print(table(costs))
    print(f"median over all: {statistics.median(cost.own_us for cost in costs):.1f} us a record on the later rank")


if __name__ == "__main__":
    main()
