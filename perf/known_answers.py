"""Known answers of every kernel family: those that a rank checks before it serves, and those of the rest.

On a card, each is compared with its torch reference on the CPU, and run twice: the bits must be the same. The references
themselves are compared with numbers that stand in `known_answers.json` (a few values of each, and its norm): a torch build
that computes wrongly on this CPU shows there, with or without a card. `python -m duovolt.perf.known_answers` writes the file.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ..checkpoint.errors import DuovoltError, one_line
from ..kernels import norm
from ..kernels.candidates import candidates, candidates_reference
from ..kernels.delta import DeltaState, DeltaWeights, Progress, delta_prefill, delta_prefill_reference
from ..kernels.kvcache import DIM, PAGE, KVCache
from ..kernels.logprobs import log_probabilities, log_probabilities_reference
from ..kernels.prefill import linear_block, linear_block_reference
from ..kernels.prefill_attention import prefill_attention, prefill_attention_reference
from ..kernels.reference import mrope_axes, rope_table
from ..kernels.reference.rope import inverse_frequencies
from ..kernels.rope import PAIRS, qkv_rope, qkv_rope_reference
from ..kernels.sampling import decide, decide_reference
from ..kernels.sampling_state import Cuts, Decision, Distributions, LaneSampling
from ..kernels.weights import BAND, GROUP, Fp8Weight
from ..runtime.engine.cuda.selftest import LARGEST_ERROR, Case, all_cases, relative_error

STORED = Path(__file__).with_name("known_answers.json")
_KEPT = 8  # values of each answer in the file
_CPU = torch.device("cpu")
Run = Callable[..., Tensor]


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One family on a card's build: relative L2 error against the reference, and whether two runs had the same bits.

    `fault`: why there is no answer.
    """

    family: str
    arch: str
    error: float | None
    repeatable: bool = True
    fault: str | None = None

    def __post_init__(self) -> None:
        if (self.error is None) == (self.fault is None):
            raise ValueError("an answer has either an error or a fault")

    @property
    def right(self) -> bool:
        """As it must be."""
        return self.fault is None and self.repeatable and self.error is not None and self.error <= LARGEST_ERROR


class Print(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A few values of an answer, evenly spread, and its norm."""

    shape: list[int]
    norm: float
    values: list[float]


def cases() -> list[Case]:
    """Every family."""
    more: list[tuple[str, Callable[[Run, torch.device], Tensor], Run, Run]] = [
        ("rotary embedding and cache", _rope, qkv_rope, qkv_rope_reference),
        ("gated norm", _gated, norm.gated_rms_norm, norm.gated_rms_norm_reference),
        ("output gate", _gate, norm.output_gate, norm.output_gate_reference),
        ("embedding", _embed, norm.embed, norm.embed_reference),
        ("linear of a block", _block, linear_block, linear_block_reference),
        ("attention of a block", _attend, prefill_attention, prefill_attention_reference),
        ("delta rule of a block", _delta, delta_prefill, delta_prefill_reference),
        ("log-probabilities", _logprobs, log_probabilities, log_probabilities_reference),  # type: ignore[list-item]
        ("candidates of a split head", _candidates, candidates, candidates_reference),
        ("sampling", _sample, decide, decide_reference),  # type: ignore[list-item]
    ]
    made = [
        Case(name, functools.partial(run, ours), functools.partial(run, torchs)) for name, run, ours, torchs in more
    ]
    return [*all_cases(), *made]


def answers_on(device: torch.device, arch: str, chosen: list[Case] | None = None) -> list[Answer]:
    """Every family on a card, with the build that is in force (`forced_arch`). What fails is an answer too."""
    found = []
    for case in cases() if chosen is None else chosen:
        try:
            first, second = case.on_device(device).cpu(), case.on_device(device).cpu()
            error = relative_error(first, case.on_cpu(_CPU))
            found.append(Answer(case.name, arch, min(error, 1e9), torch.equal(first, second)))
        except (DuovoltError, RuntimeError) as fault:
            found.append(Answer(case.name, arch, None, fault=one_line(fault)[:200]))
    return found


def answers_of_torch(chosen: list[Case] | None = None) -> list[Answer]:
    """Every reference on this CPU against the stored numbers; `arch` is "cpu"."""
    stored = msgspec.json.decode(STORED.read_bytes(), type=dict[str, Print])
    found = []
    for case in cases() if chosen is None else chosen:
        if (wanted := stored.get(case.name)) is None:
            found.append(Answer(case.name, "cpu", None, fault=f"no answer is kept in {STORED.name}"))
            continue
        made = print_of(case.on_cpu(_CPU))
        if made.shape != wanted.shape:
            found.append(Answer(case.name, "cpu", None, fault=f"shape {made.shape}, expected {wanted.shape}"))
            continue
        error = relative_error(torch.tensor([made.norm, *made.values]), torch.tensor([wanted.norm, *wanted.values]))
        found.append(Answer(case.name, "cpu", min(error, 1e9)))
    return found


def print_of(answer: Tensor) -> Print:
    """What the file keeps."""
    flat = answer.double().flatten()
    places = torch.linspace(0, flat.numel() - 1, _KEPT).long()
    return Print(list(answer.shape), float(flat.norm()), flat[places].tolist())


def _random(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _rope(run: Run, device: torch.device) -> Tensor:
    """Five tokens of two query heads and one KV head: the queries, and the keys and values that the cache then holds."""
    tokens, frequencies = 5, inverse_frequencies(DIM, 2 * PAIRS / DIM, 1e7)
    cosines, sines = (part.to(device) for part in rope_table(40, frequencies))
    cache = KVCache.empty(2, 1, int8=False, device=device)
    positions = torch.arange(3, 3 + tokens, dtype=torch.int32).repeat(3, 1).to(device)
    slots = torch.arange(60, 60 + tokens, dtype=torch.int32, device=device)
    axes = mrope_axes(PAIRS, [11, 11, 10]).int().to(device)
    projection = _random((tokens, 6 * DIM), 20, device)
    weights = [_random((DIM,), seed, device) / 4 for seed in (21, 22)]
    out = run(projection, *weights, (cosines, sines), axes, positions, slots, cache, 1e-6)
    keys, values = (part.flatten(0, 1)[60 : 60 + tokens].flatten(1) for part in cache.decoded())
    return torch.cat((out.float().flatten(1), keys, values), dim=1)


def _gated(run: Run, device: torch.device) -> Tensor:
    return run(_random((3, 4, 128), 23, device), _random((3, 512), 24, device), _random((128,), 25, device), 1e-6)


def _gate(run: Run, device: torch.device) -> Tensor:
    return run(_random((3, 2, DIM), 26, device), _random((3, 2, DIM), 27, device))


def _embed(run: Run, device: torch.device) -> Tensor:
    return run(torch.tensor([5, 0, 63], dtype=torch.int32, device=device), _random((64, 128), 28, device).bfloat16())


def _block(run: Run, device: torch.device) -> Tensor:
    """A hundred tokens: more than the decode linear is asked for."""
    words = torch.randint(0, 256, (2, 256 // GROUP, BAND, 16), generator=torch.Generator().manual_seed(29))
    weight = Fp8Weight((words & 0xBF).to(torch.uint8).to(device), _random((64,), 30, device).abs() + 0.5)
    return run(_random((100, 256), 31, device).half(), weight)


def _attend(run: Run, device: torch.device) -> Tensor:
    """Twenty tokens after 70 on two pages out of order."""
    positions, pages = 90, [1, 0]
    slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(positions)])
    cache = KVCache.empty(2, 2, int8=False)
    cache.store(slots, _random((positions, 2, DIM), 32, _CPU), _random((positions, 2, DIM), 33, _CPU))
    moved = KVCache(cache.keys.to(device), cache.values.to(device))
    query = (_random((20, 4, DIM), 34, device) / 4).half()
    return run(query, moved, torch.tensor(pages, dtype=torch.int32, device=device), positions - 20)


def _delta(run: Run, device: torch.device) -> Tensor:
    """Seventy tokens, then five more, of one key head and two value heads."""
    weights = DeltaWeights(_random((4 * 128, 4), 35, device) / 2, _random((2,), 36, device), _random((2,), 37, device))
    memory, progress = DeltaState.empty(1, weights), Progress.empty(1, device)
    parts = []
    for seed, count in ((38, 70), (39, 5)):
        joined = _random((count, weights.channels + 4), seed, device)
        mixed, a, b = joined.split([weights.channels, 2, 2], dim=1)
        parts.append(run(mixed, a, b, weights, memory, progress, 0))
    return torch.cat(parts)


def _logprobs(run: Callable[..., tuple[Tensor, Tensor, Tensor]], device: torch.device) -> Tensor:
    tokens = torch.tensor([7, 4999], dtype=torch.int32, device=device)
    chosen, values, ids = run(_random((2, 5000), 40, device) * 4, tokens, 5)
    return torch.cat((chosen[:, None], values, ids.double()), dim=1)


def _candidates(run: Run, device: torch.device) -> Tensor:
    """The first of 3,000 ids for a greedy lane with penalties, before which a draft stands, and for one of no wishes."""
    sampling = LaneSampling.empty(2, 5000, device)
    sampling.start(0, [1, 2000], temperature=0.0, repetition=1.2, presence=0.5, bias={2100: 9.0})
    sampling.start(1, [1], temperature=0.0)
    decision = Decision.of([0, 1], [3, 3], [[2500], []], device)
    return run(_random((3, 3000), 60, device) * 4, decision, sampling, first=2000)


def _sample(run: Callable[..., object], device: torch.device) -> Tensor:
    """Eight positions of a greedy lane and of two that draw with every cut, by short lists and by passes over whole rows; the
    tokens, as numbers. Every other round has lists alone."""
    vocabulary, drawn = 5000, []
    for position in range(8):
        sampling = LaneSampling.empty(3, vocabulary, device, bias=False)
        sampling.start(0, [1], temperature=0.0)
        listed = position % 2 > 0
        for lane, top_k in ((1, 40), (2, 50 if listed else 100)):
            sampling.start(lane, [1, 5, 9], temperature=0.8, top_k=top_k, top_p=0.9, min_p=0.01, repetition=1.1, seed=3)
        decision = Decision.of([0, 1, 2], [position] * 3, [[]] * 3, device)
        logits = _random((3, vocabulary), 41 + position, device) * 4
        answer = run(logits, decision, sampling, Distributions.empty(3, vocabulary, device), cuts=Cuts(listed=listed))
        drawn.append(answer.tokens[:, 0])  # type: ignore[attr-defined]
    return torch.stack(drawn).double()


if __name__ == "__main__":
    prints = {case.name: print_of(case.on_cpu(_CPU)) for case in cases()}
    STORED.write_bytes(msgspec.json.format(msgspec.json.encode(prints), indent=1) + b"\n")
