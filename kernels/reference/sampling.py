"""From one row of logits to a token. Probabilities are float64: two ranks with equal logits draw the same token."""

import torch
from torch import Tensor


def adjust_logits(
    logits: Tensor,
    seen: Tensor,
    answer_counts: Tensor,
    *,
    bias: Tensor | None,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Logits float32 [V] after bias and penalties, as a new tensor.

    `seen` bool [V]: tokens of prompt and answer; `answer_counts` float32 [V]: how often each stands in the answer;
    `bias` float32 [V] or None.
    """
    logits = logits.clone() if bias is None else logits + bias
    if repetition != 1.0:
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    if presence != 0.0:
        logits = logits - presence * (answer_counts > 0).to(logits.dtype)
    if frequency != 0.0:
        logits = logits - frequency * answer_counts
    return logits


def greedy(logits: Tensor) -> int:
    """The index of the largest logit, the lowest of equals; logits [V] without NaN."""
    return int(torch.nonzero(logits == logits.max())[0])


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities float64 [V] after temperature > 0, top_k (0: all), top_p (mass) and min_p (times the largest).

    Equal logits count in the order of their ids, so exactly top_k tokens remain.
    """
    scaled = logits.double()
    probabilities = torch.softmax((scaled - scaled.max()) / temperature, dim=-1)
    if not top_k and top_p >= 1.0 and min_p <= 0.0:
        return probabilities
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    if top_k:
        ordered, ids = ordered[:top_k], ids[:top_k]
    ordered = ordered / ordered.sum()
    keep = (ordered.cumsum(-1) - ordered < top_p) & (ordered >= min_p * ordered[0])
    keep[0] = True
    ordered = torch.where(keep, ordered, 0.0)
    return torch.zeros_like(probabilities).index_copy_(0, ids, ordered / ordered.sum())


def draw(probabilities: Tensor, random: float) -> int:
    """The first index whose running sum exceeds random * total; probabilities float64 [V], random in [0, 1)."""
    running = probabilities.cumsum(-1)
    index = int(torch.searchsorted(running, random * float(running[-1]), right=True))
    if index == len(running):  # the product was rounded up to the total: the last token with any mass
        index = int(torch.nonzero(probabilities)[-1])
    return index


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """max(target - draft, 0), normalised: what remains to be drawn after a rejection; float64 [V] each."""
    rest = (target - draft).clamp(min=0.0)
    total = float(rest.sum())
    # Equal distributions reject nothing; only rounding leads here, and then the target itself is right.
    return rest / total if total > 0.0 else target


def log_probabilities(logits: Tensor, token: int, best: int) -> tuple[float, list[tuple[int, float]]]:
    """log p(token) and the `best` most likely (id, log p), ties by id, under the softmax of logits [V]."""
    normalised = torch.log_softmax(logits.double(), dim=-1)
    if not best:
        return float(normalised[token]), []
    values, ids = torch.sort(normalised, descending=True, stable=True)
    return float(normalised[token]), list(zip(ids[:best].tolist(), values[:best].tolist(), strict=True))
