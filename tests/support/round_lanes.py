"""Lanes of a round in every state, and what they have drafted."""

import torch

from duovolt.kernels.round_state import Draws, Lanes

LANES, PAGES = 4, 5


def lanes_on(device: torch.device) -> Lanes:
    """Lane 0 in the middle, 1 with two tokens to go, 2 at a page's edge with a short table, 3 at rest."""
    lanes = Lanes.empty(LANES, PAGES, device)
    rows = {
        "lengths": [100, 70, 127, 9],
        "limits": [300, 73, 300, 0],
        "prompts": [40, 70, 40, 9],
        "shifts": [0, -7, 3, 0],
        "kept": [3, 1, 6, 1],
    }
    for name, values in rows.items():
        getattr(lanes, name).copy_(torch.tensor(values))
    lanes.edges.copy_(torch.arange(12).view(3, 4) + 50)
    lanes.next.copy_(torch.arange(24).view(4, 6) + 1000)
    lanes.tables.copy_(torch.arange(20).view(4, 5) % 7)
    lanes.tables[2, 2:] = -1
    return lanes


def draws_on(device: torch.device, drafts: int, sequences: int) -> Draws:
    draws = Draws.empty(drafts, sequences, device)
    draws.tokens[:, :, 0] = torch.arange(max(drafts, 1) * sequences, device=device).view(-1, sequences).int() + 7
    draws.produced.fill_(1)
    draws.chance.copy_(torch.linspace(0.1, 0.9, draws.chance.numel()).view(draws.chance.shape))
    if drafts > 2:
        draws.produced[1, 0] = 0  # lane 0's second draft was broken
    return draws
