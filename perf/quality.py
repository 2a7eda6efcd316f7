"""Quality of a checkpoint on held-out text: bits per byte, perplexity, divergence from a reference, known words in greedy
continuations, draft acceptance.

Everything runs on our own engine, so that the figures of two recipes differ by their weights alone.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..checkpoint.directory import MAX_JSON, require_file
from ..checkpoint.errors import InputError
from ..runtime.engine.engine import Engine
from ..runtime.engine.loading import EngineSettings, load_engine
from ..runtime.messages import GenerateRequest, SamplingParams, TokenEvent
from ..runtime.parallel.base import SoloCollective
from .divergence import Divergence, Predictor, divergence

DOCUMENT_START = "<|endoftext|>"
DOCUMENT = re.compile(r"^=== document: .* ===$", re.MULTILINE)
WORD = re.compile(r"(?<![A-Za-z_])[a-z]{2,}(?![A-Za-z_])")  # prose, not parts of identifiers


@dataclass(frozen=True)
class Quality:
    """Figures and what they were measured on. Shares are 0 to 1, `tokens_per_second` those of this machine's CPU.

    `divergence` is None where there is no reference to be measured against.
    """

    bits_per_byte: float
    scored_bytes: int
    scored_tokens: int
    known_word_share: float
    words: int
    drafts: int
    proposed: int
    accepted: int
    generated_tokens: int
    tokens_per_second: float
    divergence: Divergence | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token, in nats."""
        return math.exp(self.bits_per_byte * self.scored_bytes * math.log(2) / max(1, self.scored_tokens))

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Protocol:
    """What is measured: windows for scoring, prompts for continuing (both in tokens)."""

    window: int = 512
    score_bytes: int = 80_000
    prompts: int = 10
    prompt_tokens: int = 64
    continuation: int = 128
    drafts: int = 3


def documents(text: str) -> list[str]:
    """The documents of a held-out file, each begun by a line `=== document: NAME ===`; a file without one is one."""
    return [part.strip() for part in DOCUMENT.split(text) if part.strip()]


def known_words(continuation: str, words: set[str]) -> tuple[int, int]:
    """(known, all) words of one continuation; its first and last, which may be cut, do not count."""
    found = WORD.findall(continuation.partition(" ")[2].rpartition(" ")[0])
    return sum(word in words for word in found), len(found)


def _finish(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work():
        yield from engine.step()[1]


def _windows(tokenizer: Tokenizer, texts: list[str], protocol: Protocol) -> Iterator[tuple[int, list[list[int]]]]:
    """For each text, its bytes and windows: every token is predicted once, the first from the document's start token."""
    start = tokenizer.token_to_id(DOCUMENT_START)
    if start is None:
        raise InputError(f"the tokenizer has no {DOCUMENT_START}; give a checkpoint of the family.")
    total = 0
    for text in texts:
        if total >= protocol.score_bytes:
            return
        text = text.encode()[: protocol.score_bytes - total].decode(errors="ignore")
        ids = [start, *tokenizer.encode(text, add_special_tokens=False).ids]
        size, step = len(text.encode()), protocol.window
        total += size
        yield size, [ids[first : first + step + 1] for first in range(0, len(ids) - 1, step)]


def _score(
    engine: Engine, tokenizer: Tokenizer, texts: list[str], protocol: Protocol, tick: Callable[[int], None]
) -> tuple[float, int, int]:
    """(bits, bytes, tokens) of the texts' windows."""
    nats, total, tokens = 0.0, 0, 0
    for size, windows in _windows(tokenizer, texts, protocol):
        for window in windows:
            sampling = SamplingParams(temperature=0.0, logprobs=1)
            engine.add(GenerateRequest(1, window, 0, [], False, sampling, echo_logprobs=True))
            for event in _finish(engine):
                if event.error:
                    raise InputError(event.error)
                nats -= sum(entry.logprob for entry in event.prompt_logprobs)
                tokens += len(event.prompt_logprobs)
        total += size
        tick(size)
    return nats / math.log(2), total, tokens


def _continue(
    engine: Engine, prompts: list[list[int]], protocol: Protocol, tick: Callable[[int], None]
) -> tuple[list[list[int]], int, int]:
    answers, proposed, accepted = [], 0, 0
    for prompt in prompts:
        engine.add(GenerateRequest(1, prompt, protocol.continuation, [], True, SamplingParams(temperature=0.0)))
        answer: list[int] = []
        for event in _finish(engine):
            answer += event.tokens
            proposed += event.proposed
            accepted += event.accepted
        answers.append(answer)
        tick(len(answer))
    return answers, proposed, accepted


def _prompts(tokenizer: Tokenizer, texts: list[str], protocol: Protocol) -> list[list[int]]:
    """Evenly spread openings: one from the middle of each of the longest documents, in turn."""
    encoded = [
        ids
        for text in texts
        if len(ids := tokenizer.encode(text, add_special_tokens=False).ids) > protocol.prompt_tokens
    ]
    if not encoded:
        raise InputError(f"no document of the text is longer than {protocol.prompt_tokens} tokens.")
    found: list[list[int]] = []
    step = 0
    while len(found) < protocol.prompts:
        ids = encoded[step % len(encoded)]
        room = len(ids) - protocol.prompt_tokens
        # Successive rounds over the documents take other places: multiples of an irrational share never repeat.
        at = int(room * math.fmod((1 + step // len(encoded)) * 0.6180339887498949, 1.0))
        found.append(ids[at : at + protocol.prompt_tokens])
        step += 1
    return found


def measure(
    directory: Path,
    text: str,
    words: set[str],
    protocol: Protocol,
    tick: Callable[[int], None],
    against: Predictor | None = None,
) -> Quality:
    """Measure one directory: a source, converted or rank-0-of-1 directory. `against`: the reference of the divergence.

    Raises InputError.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise InputError(f"{path}: no such file; quality is measured on text, which needs the tokenizer.")
    require_file(path, MAX_JSON, "a tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    torch.set_num_threads(1)  # the ops are small: more threads only wait for one another
    context = max(protocol.window + 1, protocol.prompt_tokens + protocol.continuation) + 8
    settings = EngineSettings(max_context=context, drafts=protocol.drafts)
    engine = load_engine(directory, SoloCollective(), settings)
    texts = documents(text)
    bits, scored, tokens = _score(engine, tokenizer, texts, protocol, tick)
    found = None
    if against is not None:  # what a window predicts, its last token excepted: nothing follows it
        windows = [window[:-1] for _, group in _windows(tokenizer, texts, protocol) for window in group]
        found = divergence(against, Predictor(directory, protocol.window), windows, lambda count: None)
    started = time.perf_counter()
    answers, proposed, accepted = _continue(engine, _prompts(tokenizer, texts, protocol), protocol, tick)
    seconds = time.perf_counter() - started
    counts = [known_words(tokenizer.decode(answer), words) for answer in answers]
    known, seen = (sum(column) for column in zip(*counts, strict=True))
    generated = sum(map(len, answers))
    return Quality(
        bits_per_byte=bits / max(1, scored),
        scored_bytes=scored,
        scored_tokens=tokens,
        known_word_share=known / max(1, seen),
        words=seen,
        drafts=protocol.drafts,
        proposed=proposed,
        accepted=accepted,
        generated_tokens=generated,
        tokens_per_second=generated / max(seconds, 1e-9),
        divergence=found,
    )
