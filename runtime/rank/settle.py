"""What `preflight` decides, from facts: cards for the ranks, kernels for the model, memory for context and lanes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from ...checkpoint.errors import DuovoltError
from ...kernels.prefill import FEW_TOKENS
from ...kernels.prefill_attention import torch_attends
from ...kernels.tuning import choice_for
from ..engine.cuda.fitness import check_fitness, check_limits
from ..engine.cuda.loading import LoadPlan, plan_load
from ..engine.cuda.plan import Demand, fit, plan_memory
from ..engine.pages import pages_for
from ..images.processor import ImageProcessor
from .cards import Card, Probe, choose_cards, cpus_near, probe, room_a_rank
from .preflight import Refused, Settled, Wishes


class Unfit(Exception):
    """No card, no code for it, or no kernels for this model."""

    def __init__(self, fault: DuovoltError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def settle(wishes: Wishes, found: Probe | None) -> Settled:
    """Everything that must be the same on every rank. `found` None: no card is to be used.

    Raises Unfit for a machine or a model that the engine cannot serve, InputError or EnvironmentFault for a wish that
    cannot be had: too little memory, more lanes than the kernels take.
    """
    check_limits(wishes.lanes, wishes.drafts)
    directories = [Path(path) for path in wishes.directories]
    try:
        cards = [] if found is None else choose_cards(found, len(directories), wishes.devices)
        plans = [plan_load(path) for path in directories]
        check_fitness(plans[0].source.config, len(directories), str(directories[0]))
    except DuovoltError as fault:
        raise Unfit(fault) from None
    demand = demand_of(wishes, plans, cards)
    limit = demand.config.text.max_position_embeddings
    if cards:
        memory = fit(demand, room_a_rank(cards), wishes.max_context, limit)
    else:
        context = limit if wishes.max_context is None else wishes.max_context
        memory = plan_memory(demand, context, wishes.lanes * pages_for(context))
    return Settled(
        uuids=[card.uuid for card in cards],
        numbers=[card.index for card in cards],
        card=str(cards[0]) if cards else "none: the kernels' torch references on the CPU",
        max_context=memory.max_context,
        pages=memory.pages,
        kept=memory.kept,
        planned=memory.total,
        plan=list(memory.lines()),
        near=[sorted(cpus_near(card)) for card in cards],
    )


def demand_of(wishes: Wishes, plans: list[LoadPlan], cards: list[Card]) -> Demand:
    """What the heaviest rank asks of its card."""
    config = plans[0].source.config
    patches = 0
    if config.vision is not None:
        processor = ImageProcessor.read(Path(wishes.directories[0]), config.vision)
        patches = processor.max_pixels // processor.patch**2
    return Demand(
        config=config,
        tp=len(plans),
        weights=max(plan.nbytes for plan in plans),
        kv=wishes.kv,
        lanes=wishes.lanes,
        drafts=wishes.drafts,
        chunk=wishes.prefill_chunk,
        vision=max(plan.vision for plan in plans),
        picture_patches=patches,
        keys_in_a_row=not cards or torch_attends(cards[0].capability),
        captured=bool(cards),
        keep=wishes.plain_weights if wishes.prefill_chunk > FEW_TOKENS else 0,  # fewer take none
        ahead=choice_for(cards[0].name).layers_ahead(cards[0].capability) if cards else 0.0,
    )


def answer(wishes: Wishes) -> Settled | Refused:
    """What `settle` says of this machine, faults included."""
    try:
        return settle(wishes, None if wishes.on_cpu else probe())
    except Unfit as unfit:
        return Refused(str(unfit), unfit.fault.exit_code, True)
    except DuovoltError as fault:
        return Refused(str(fault), fault.exit_code, False)


def main() -> int:
    """Wishes as JSON in, the answer as the last line out."""
    found = answer(msgspec.json.decode(sys.stdin.buffer.read(), type=Wishes))
    print(json.dumps({"settled": isinstance(found, Settled), "value": msgspec.to_builtins(found)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
