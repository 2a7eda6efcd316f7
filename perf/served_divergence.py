"""How far a server's predictions are from another's or a checkpoint's, of what a server tells: its likeliest tokens.

At every position of the same text both distributions are made coarse: the tokens that both name stay, all others become one
outcome with the rest of the probability. The divergence of the coarse distributions,
    sum over common tokens of p (log p - log q)  +  p_rest (log p_rest - log q_rest),
is at most the full KL(P || Q), by the log-sum inequality: a lower bound in nats, the tighter the more of the reference's
probability lies on common tokens (`seen`). P is the reference's.
"""

import math
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from ..checkpoint.directory import MAX_JSON, require_file
from ..checkpoint.errors import InputError
from .divergence import Predictor
from .graded.result import CoarseDivergence
from .served_text import TextServer, Window

_LEAST_REST = 1e-6  # what rounding leaves; a larger q only lowers the bound
_BROKEN = "\ufffd"  # part of a character: several tokens read like that


def coarse(reference: dict[str, float], measured: dict[str, float]) -> tuple[float, float]:
    """(nats, share of the reference's probability on common tokens) of one position; log-probabilities by token."""
    common = [token for token in reference if token in measured and _BROKEN not in token]
    p = [math.exp(reference[token]) for token in common]
    q = [math.exp(measured[token]) for token in common]
    seen = math.fsum(p)
    nats = [one * (reference[token] - measured[token]) for one, token in zip(p, common, strict=True)]
    p_rest, q_rest = max(0.0, 1.0 - seen), max(_LEAST_REST, 1.0 - math.fsum(q))
    rest = p_rest * math.log(p_rest / q_rest) if p_rest > 0 else 0.0
    return max(0.0, math.fsum([*nats, rest])), min(1.0, seen)


def against_server(windows: list[Window], reference: TextServer) -> CoarseDivergence:
    """Teacher-forced over `windows`. Raises InputError if the reference cuts the text into other tokens."""
    others = [reference.score(window.text) for window in windows]
    return _mean(windows, others, "server")


def against_directory(windows: list[Window], directory: Path) -> CoarseDivergence:
    """The same with a checkpoint on this machine's CPU as reference. Raises InputError, CheckFailed."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise InputError(f"--against {directory}: no tokenizer.json there.")
    require_file(path, MAX_JSON, "a tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    encoded = [tokenizer.encode(window.text, add_special_tokens=False).ids for window in windows]
    predictor = Predictor(directory, max(map(len, encoded)))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(predictor.sampleable)]
    often = Counter(texts)
    ids = {text: token for token, text in enumerate(texts) if often[text] == 1}
    others = []
    for window, tokens in zip(windows, encoded, strict=True):
        names = [texts[token] if token < len(texts) else "" for token in tokens]
        _same(window.tokens, names)
        rows = predictor.log_probabilities(tokens)
        tops = []
        for row, measured in zip(rows, window.top, strict=False):
            best = int(row.argmax())
            tops.append({texts[best]: float(row[best])} | {t: float(row[ids[t]]) for t in measured if t in ids})
        others.append(Window(window.text, names, [], tops))
    return _mean(windows, others, "directory")


def _same(measured: list[str], reference: list[str]) -> None:
    if measured != reference:
        raise InputError("--against: it cuts the text into other tokens; two models of one tokenizer are compared.")


def _mean(windows: list[Window], others: list[Window], kind: str) -> CoarseDivergence:
    found, seen, same = [], [], 0
    for window, other in zip(windows, others, strict=True):
        _same(window.tokens, other.tokens)
        for measured, reference in zip(window.top, other.top, strict=True):
            if not measured or not reference:
                raise InputError("--against: a server gives no top_logprobs, of which a divergence could be told.")
            nats, share = coarse(reference, measured)
            found.append(nats)
            seen.append(share)
            same += max(reference, key=reference.__getitem__) == max(measured, key=measured.__getitem__)
    count = len(found)
    return CoarseDivergence(math.fsum(found) / count, max(found), same / count, math.fsum(seen) / count, count, kind)
