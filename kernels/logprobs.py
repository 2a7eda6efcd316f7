"""The model's own log-probabilities on a GPU, in float64: of given tokens, and of the most likely ones."""

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .checks import check, check_dimensions, check_rows, launch
from .sampling_state import SLICES

SOURCE = "logprobs.cu"
MAX_BEST = 20
_THREADS = 256


def log_probabilities(logits: Tensor, tokens: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the softmax of logits float32 [R, V]: of tokens int32 [R], and of the `best` (0 .. 20) first.

    Returns float64 [R] (NaN for a token outside of the vocabulary), float64 [R, best] and int32 [R, best], most likely
    first, ties by id. Raises InputError and EnvironmentFault as `decide` does.
    """
    stride = _checked_logprobs(logits, tokens, best)
    rows, vocabulary = logits.shape
    device, kept = logits.device, max(best, 1)
    sums = torch.empty(rows, SLICES, dtype=torch.float64, device=device)
    values = torch.empty(rows, SLICES, kept, device=device)
    ids = torch.empty(rows, SLICES, kept, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.float64, device=device)
    best_values = torch.empty(rows, best, dtype=torch.float64, device=device)
    best_ids = torch.empty(rows, best, dtype=torch.int32, device=device)
    shared = (logits, stride, vocabulary, best, sums, values, ids)
    launch(SOURCE, "logprob_slices", (SLICES, rows), _THREADS, shared, device)
    launch(SOURCE, "logprob_merge", rows, _THREADS, (*shared, tokens, chosen, best_values, best_ids), device)
    return chosen, best_values, best_ids


def log_probabilities_reference(logits: Tensor, tokens: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `log_probabilities` computes, in torch on any device."""
    _checked_logprobs(logits, tokens, best)
    normalised = torch.log_softmax(logits.double(), dim=-1)
    values, ids = torch.sort(normalised, dim=-1, descending=True, stable=True)
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    chosen = normalised.gather(1, torch.where(inside, tokens, 0).long()[:, None])[:, 0]
    return torch.where(inside, chosen, float("nan")), values[:, :best], ids[:, :best].int()


def _checked_logprobs(logits: Tensor, tokens: Tensor, best: int) -> int:
    check_dimensions("logits", logits, 2, "[R, V]")
    if not 0 <= best <= MAX_BEST:
        raise InputError(f"best is {best}: expected 0 to {MAX_BEST} log-probabilities.")
    check("tokens", tokens, torch.int32, (logits.shape[0],), logits.device)
    return check_rows("logits", logits, torch.float32, tuple(logits.shape), logits.device, 4)
