"""What the reference keeps of a running answer beside the host's record of it."""

import torch
from torch import Tensor

from .lane import Lane
from .sampling import Sampler
from .vision import PromptImages, VisionTower


class Answering:
    """A lane at work.

    hidden   the target's hidden states [r, hidden] that the MTP layer has not seen, the last r positions of the cache;
             without an MTP layer in use, only the last; None where nothing has passed since the last draft
    images   the prompt's pictures that are yet to be read
    """

    def __init__(self, lane: Lane, vocabulary: int, tower: VisionTower | None) -> None:
        self.lane = lane
        self.sampler = Sampler(lane.request.sampling, lane.request.prompt, vocabulary, lane.constraint)
        self.hidden: Tensor | None = None
        self.images = PromptImages(lane.request.images, tower)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Add hidden states [r, hidden] that the MTP layer will read later."""
        self.hidden = hidden if self.hidden is None else torch.cat((self.hidden, hidden))
