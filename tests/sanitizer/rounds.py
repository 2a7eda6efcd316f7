"""The bookkeeping of rounds."""

import torch

from duovolt.kernels.delta import Progress
from duovolt.kernels.round import round_advance, round_rows, scatter_logits
from duovolt.kernels.round_state import DRAFT as DRAFT_ROWS
from duovolt.kernels.round_state import KEPT, VERIFY, Draws, Lanes, Pass
from duovolt.kernels.sampling_state import Drawn
from duovolt.tests.support.round_lanes import draws_on, lanes_on

from .launching import empty, here, ints, randn, run, touch, zeros


def _lanes():
    """Made on the host: a copy writes all of it."""
    lanes = lanes_on("cpu")
    lanes.stops[2, 5] = 14
    return Lanes(*(part.to(here.device) for part in vars(lanes).values()))


def _draws(drafts, sequences):
    return Draws(*(part.to(here.device) for part in vars(draws_on("cpu", drafts, sequences)).values()))


def _pass(kind, sequences, rows):
    """Nothing of it is written before the kernel but for the tables, of which the kernel fills a part."""
    shape = Pass.empty(kind, torch.full((sequences, 5), -9, dtype=torch.int32).to(here.device), rows)
    return Pass(**{name: part if name == "tables" else torch.empty_like(part) for name, part in vars(shape).items()})


def rounds(native):
    for order in ([0], [2, 0], [3, 1, 0, 2], [-1, 1]):

        def go(order=order):
            for drafts in (0, 1, 3, 5):
                passes = [(VERIFY, 0), (KEPT, 0), *((DRAFT_ROWS, step) for step in range(1, drafts))]
                for kind, step in passes:
                    for window, certain, copies in ((0, False, True), (2, True, False), (1, False, True)):
                        rows = 1 if kind == DRAFT_ROWS else 1 + drafts
                        into, produced = _pass(kind, len(order), rows), empty(len(order), dtype=torch.int32)
                        round_rows(
                            ints(*order),
                            _lanes(),
                            _draws(drafts, len(order)),
                            into,
                            produced,
                            kind=kind,
                            drafts=drafts,
                            step=step,
                            window=window,
                            certain=certain,
                            copies=copies,
                        )
                        if certain or kind != VERIFY or here.tool != "race":
                            touch(produced, *vars(into).values())

        run(f"round_rows, lanes {order}", go)

    def advance():
        for through in (True, False):
            for width in (8, 5120):
                order, lanes, draws = [0, 3, 2, 1], _lanes(), _draws(3, 4)
                verified, produced = _pass(VERIFY, 4, 4), empty(4, dtype=torch.int32)
                round_rows(ints(*order), lanes, draws, verified, produced, kind=VERIFY, drafts=3)
                drawn = Drawn(
                    torch.arange(24, dtype=torch.int32).view(4, 6).to(here.device),
                    ints(2, 1, 4, 0),
                    torch.ones(4, dtype=torch.float64).to(here.device),
                )
                progress = Progress(ints(2, 0, 4, 1), ints(0, 1, 0, 1))
                report = empty(5, 8, dtype=torch.int32)
                counters = torch.arange(300, dtype=torch.int32).to(here.device)
                round_advance(
                    lanes,
                    verified,
                    drawn,
                    progress if through else None,
                    randn(16, width),
                    zeros(4, 6, width),
                    counters,
                    report,
                )
                touch(report[:4], report[4, :1], *vars(lanes).values())

    run("round_rows and round_advance", advance)

    def scatter():
        ids = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:260].int()
        ids[5], ids[6] = -1, 500
        out = torch.full((2, 500), float("-inf")).to(here.device)
        scatter_logits(randn(2, 300)[:, :260], ids.to(here.device), out)
        touch(out)

    run("round_scatter", scatter)
