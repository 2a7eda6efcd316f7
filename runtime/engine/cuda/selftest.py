"""Known answers before a rank calls itself ready: one small case of each kernel family, against torch on the CPU.

A card, a driver or a build that computes wrongly gives plausible nonsense for hours; this costs a second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....checkpoint.errors import CheckFailed
from ....kernels.attention import Sequences, decode_attention, decode_attention_reference
from ....kernels.delta import (
    DeltaState,
    DeltaWeights,
    Progress,
    Round,
    delta_decode,
    delta_decode_reference,
    delta_prefill,
    delta_prefill_reference,
)
from ....kernels.kvcache import DIM, PAGE, KVCache
from ....kernels.linear import linear, linear_reference, swiglu, swiglu_reference
from ....kernels.norm import rms_norm, rms_norm_reference
from ....kernels.plain_attention import plain_attention
from ....kernels.prefill import FEW_TOKENS, linear_block, linear_block_reference
from ....kernels.prefill_attention import prefill_attention, prefill_attention_reference
from ....kernels.sampling import decide, decide_reference
from ....kernels.sampling_state import Cuts, Decision, Distributions, LaneSampling
from ....kernels.weights import BAND, GROUP, Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight

ROWS, COLUMNS, TOKENS = 64, 256, 3
MANY_COLUMNS = 5120  # which nvfp4 reads in slices where the card can
ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half")
VOCABULARY = 300
LARGEST_ERROR = 4e-3  # relative L2: results are rounded to fp16 at most twice


@dataclass(frozen=True)
class Case:
    """A name, and the operation on a device: the same numbers wherever it runs."""

    name: str
    on_device: Callable[[torch.device], Tensor]
    on_cpu: Callable[[torch.device], Tensor]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in L2; infinite where something is not finite."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def check_answers(device: torch.device, cases: list[Case] | None = None) -> list[tuple[str, float]]:
    """Name and relative error of every case. Raises CheckFailed naming those that are wrong, EnvironmentFault if a kernel
    cannot be built or started."""
    found = []
    for case in all_cases() if cases is None else cases:
        found.append((case.name, relative_error(case.on_device(device).cpu(), case.on_cpu(torch.device("cpu")))))
    if wrong := [f"{name} (relative error {error:.2g})" for name, error in found if error > LARGEST_ERROR]:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise CheckFailed(
            f"self-test on {name}: wrong answers of {', '.join(wrong)}. This card must not serve: check driver and build "
            "with `duovolt doctor`, and try without DUOVOLT_KERNELS and with an empty kernel cache."
        )
    return found


def all_cases() -> list[Case]:
    """Every encoding of the linears and of the fused gate, both caches, both ways of attention, the delta rule, the norm,
    a decision; of a prompt's chunk, too."""
    cases = [
        _pair(f"linear {encoding}", partial(_multiply, encoding), linear, linear_reference) for encoding in ENCODINGS
    ]
    for kind in ("int8", "fp16"):
        attend = partial(_attend, kind == "int8")
        cases.append(_pair(f"attention {kind}", attend, decode_attention, decode_attention_reference))
        read = partial(_read, kind == "int8")
        cases.append(_pair(f"attention of a prompt {kind}", read, prefill_attention, prefill_attention_reference))
        cases.append(_pair(f"attention {kind} in the plain way", attend, plain_attention, decode_attention_reference))
    for name, chunked in (("in chunks", True), ("token by token", False)):
        run = partial(_delta_prompt, chunked)
        cases.append(_pair(f"delta rule of a prompt {name}", run, delta_prefill, delta_prefill_reference))
    for encoding in ENCODINGS:
        run = partial(_multiply, encoding, tokens=FEW_TOKENS + 34)  # plain weights, and the vendor's product
        cases.append(_pair(f"linear of a prompt {encoding}", run, linear_block, linear_block_reference))
    for encoding in ENCODINGS:
        cases.append(_pair(f"swiglu {encoding}", partial(_swiglu, encoding), swiglu, swiglu_reference))
    return [
        *cases,
        _pair("linear of many columns", partial(_multiply, "nvfp4", columns=MANY_COLUMNS), linear, linear_reference),
        _pair("decision", _decide, decide, decide_reference),
        _pair("delta rule", _delta, delta_decode, delta_decode_reference),
        _pair("norm", _norm, rms_norm, rms_norm_reference),
    ]


def _pair(
    name: str,
    run: Callable[[Callable[..., Any], torch.device], Tensor],
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
) -> Case:
    return Case(name, lambda device: run(kernel, device), lambda device: run(reference, device))


def _random(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _words(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Bytes without the NaN codes of E4M3, of moderate size."""
    words = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    return (words & 0xBF).to(torch.uint8).to(device)


def _input(device: torch.device, tokens: int = TOKENS, columns: int = COLUMNS) -> Tensor:
    return _random((tokens, columns), 1, torch.device("cpu")).half().to(device)


def _weight(encoding: str, device: torch.device, columns: int = COLUMNS) -> Weight:
    bands, groups = ROWS // BAND, columns // GROUP
    if encoding == "nvfp4":
        words, scales = _words((bands, groups, BAND, 8), 2, device), _words((bands, groups, BAND), 3, device)
        return Nvfp4Weight(words, scales & 0x3F, torch.full((1,), 0.125, device=device))
    if encoding == "half":
        return HalfWeight.of(_random((ROWS, COLUMNS), 2, torch.device("cpu")).half().to(device))
    words = _words((bands, groups, BAND, 16), 2, device)
    if encoding == "fp8_blocks":
        return Fp8BlockWeight(words, _random((1, 2), 3, device).abs() + 0.5)
    return Fp8Weight(words, _random((ROWS,), 3, device).abs() + 0.5)


def _multiply(
    encoding: str, run: Callable[..., Tensor], device: torch.device, tokens: int = TOKENS, columns: int = COLUMNS
) -> Tensor:
    return run(_input(device, tokens, columns), _weight(encoding, device, columns))


def _decide(run: Callable[..., Any], device: torch.device) -> Tensor:
    """Two drafts judged greedily, the first of them the likeliest token, and a token drawn of the forty likeliest."""
    logits = 3 * _random((4, VOCABULARY), 16, torch.device("cpu"))
    sampling = LaneSampling.empty(2, VOCABULARY, device)
    sampling.start(0, [1, 5], temperature=0.0)
    sampling.start(1, [1, 5], top_k=40, repetition=1.3, seed=7)
    decision = Decision.of([0, 1], [9, 9], [[int(logits[0].argmax()), 3], []], device)
    into = Distributions.empty(4, VOCABULARY, device)
    drawn = run(logits.to(device), decision, sampling, into, cuts=Cuts(True, False))
    return torch.nn.functional.one_hot(drawn.tokens.long() + 1, VOCABULARY + 1).float()  # another token, another row


def _norm(run: Callable[..., Tensor], device: torch.device) -> Tensor:
    return run(_input(device).float(), _random((COLUMNS,), 5, device), 1e-6)


def _swiglu(encoding: str, run: Callable[..., Tensor], device: torch.device) -> Tensor:
    x = (_input(device).float() / 64).half()
    return run(x, _weight(encoding, device), _weight(encoding, device))


def _cache(int8: bool, positions: int, pages: list[int], device: torch.device) -> KVCache:
    """Two KV heads' random keys and values, on pages in this order."""
    heads, cpu = 2, torch.device("cpu")
    cache = KVCache.empty(len(pages), heads, int8=int8, device="cpu")
    slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(positions)])
    cache.store(slots, *(_random((positions, heads, DIM), seed, cpu) for seed in (6, 7)))
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return KVCache(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def _query(tokens: int, device: torch.device) -> Tensor:
    return (_random((tokens, 12, DIM), 8, torch.device("cpu")) / 4).half().to(device)


def _attend(int8: bool, run: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Three tokens of one sequence at the end of 150 positions on three pages out of order."""
    positions, pages = 150, [2, 0, 1]
    tables = torch.tensor([pages], dtype=torch.int32, device=device)
    sequences = Sequences.of(tables, [positions - TOKENS], [TOKENS])
    cache = _cache(int8, positions, pages, device)
    return run(_query(TOKENS, device), cache, sequences, max_tokens=4, max_positions=positions + 10)


def _read(int8: bool, run: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Thirty tokens of a prompt after 120, by the kernel that this card would use."""
    positions, count, pages = 150, 30, [2, 0, 1]
    table = torch.tensor(pages, dtype=torch.int32, device=device)
    return run(_query(count, device), _cache(int8, positions, pages, device), table, positions - count)


def _delta_weights(device: torch.device) -> DeltaWeights:
    """One key head, two value heads."""
    return DeltaWeights(
        _random((4 * 128, 4), 9, device) / 2, _random((2,), 10, device) / 4, _random((2,), 11, device) / 4
    )


def _delta_prompt(chunked: bool, run: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Ninety tokens and forty more, neither a whole number of chunks, and the state that they leave."""
    weights = _delta_weights(device)
    memory, progress, parts, position = DeltaState.empty(1, weights), Progress.empty(1, device), [], 0
    for seed, count in ((14, 90), (15, 40)):
        joined = _random((count, weights.channels + 2 * weights.value_heads), seed, device)
        mixed, a, b = joined.split([weights.channels, weights.value_heads, weights.value_heads], dim=1)
        out = run(mixed, a, b, weights, memory, progress, 0, chunked=chunked, position=position)
        parts.append(out.flatten())
        position += count
    return torch.cat([*parts, memory.state.flatten()])


def _delta(run: Callable[..., Tensor], device: torch.device) -> Tensor:
    """A round of three tokens after one of two of which one stood: replay, recurrence, convolution and gates."""
    weights = _delta_weights(device)
    memory, progress = DeltaState.empty(1, weights), Progress.empty(1, device)
    out = torch.empty(0, device=device)
    for seed, count, accepted in ((12, 2, 1), (13, TOKENS, 0)):
        joined = _random((count, weights.channels + 2 * weights.value_heads), seed, device)
        mixed, a, b = joined.split([weights.channels, weights.value_heads, weights.value_heads], dim=1)
        out = run(mixed, a, b, weights, memory, progress, Round.of([0], [count], device))
        progress.advance(0, accepted)
    return out
