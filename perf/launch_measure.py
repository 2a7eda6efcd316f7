"""Measures the launches of a ledger one by one, at their real shapes: cold weights, caches and states, in captured graphs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from ..kernels.attention import Sequences, decode_attention
from ..kernels.delta import HEAD, DeltaState, DeltaWeights, Progress, Round, delta_decode
from ..kernels.kvcache import DIM, PAGE, KVCache
from ..kernels.linear import prepare
from ..kernels.norm import embed, gated_rms_norm, rms_norm
from ..kernels.reference import mrope_axes, rope_table
from ..kernels.reference.rope import inverse_frequencies
from ..kernels.rope import PAIRS, qkv_rope
from ..runtime.engine.cuda.flights import BUCKETS
from .device_timing import time_queued
from .kernels import Case, copies_of, random_weight
from .kernels import launches as linear_launches
from .launch_file import LaunchTime
from .ledger import Launch

POOL_BYTES = 3 << 29
RANDOM = ("nvfp4", "fp8", "half")  # encodings whose words can be made up
_WARM_COPIES = 24  # of what lies in the second-level cache in a round too
_EPS = 1e-6
Calls = list[Callable[[], object]]


def measure_launches(
    launches: Iterable[Launch], device: torch.device, tell: Callable[[LaunchTime], None] = lambda one: None
) -> list[LaunchTime]:
    """A time for each launch; `tell` is told at once."""
    prepare(device)
    found = []
    for launch in launches:
        found.append(_measured(launch, device))
        tell(found[-1])
        torch.cuda.empty_cache()
    return found


def _measured(launch: Launch, device: torch.device) -> LaunchTime:
    calls = _calls(launch, device)
    if calls is None:
        return LaunchTime(launch.key, launch.moved, 0.0, why="no measurement of this kernel")
    for call in calls[:2]:
        call()
    timing = time_queued(calls, device)
    if timing.dry:
        return LaunchTime(launch.key, launch.moved, 0.0, why="the queue ran dry: the host is too busy")
    return LaunchTime(launch.key, launch.moved, timing.seconds, timing.spread)


def _calls(launch: Launch, device: torch.device) -> Calls | None:
    kernel = launch.kernel
    if kernel in ("linear", "linears", "swiglu"):
        return _linear(launch, device)
    if kernel in ("attention_int8", "attention_fp16"):
        return _attention(launch, device)
    if kernel == "delta_decode":
        return _delta(launch, device)
    if kernel in ("qkv_rope_int8", "qkv_rope_fp16"):
        return _rope(launch, device)
    tokens = launch.tokens
    if kernel in ("rms_norm", "rms_norm_delta"):
        width = int(launch.form)
        x = torch.randn(tokens, width, device=device)
        delta = torch.zeros_like(x) if kernel == "rms_norm_delta" else None
        return [partial(rms_norm, x, torch.zeros(width, device=device), _EPS, delta=delta)] * _WARM_COPIES
    if kernel == "gated_rms_norm":
        heads = int(launch.form)
        x, gate = torch.randn(tokens, heads, HEAD, device=device), torch.randn(tokens, heads * HEAD, device=device)
        return [partial(gated_rms_norm, x, gate, torch.ones(HEAD, device=device), _EPS)] * _WARM_COPIES
    if kernel == "embed":
        table = torch.zeros(1 << 16, int(launch.form), dtype=torch.bfloat16, device=device)
        ids = [torch.randint(0, 1 << 16, (tokens,), dtype=torch.int32, device=device) for _ in range(_WARM_COPIES)]
        return [partial(embed, one, table) for one in ids]
    return None


def _linear(launch: Launch, device: torch.device) -> Calls | None:
    matrices = []
    for word in launch.form.split():
        encoding, _, extents = word.partition(":")
        rows, _, columns = extents.partition("x")
        if encoding not in RANDOM:
            return None
        matrices.append((encoding, int(rows), int(columns)))
    swiglu = launch.kernel == "swiglu"
    if swiglu and matrices[0] != matrices[1]:
        return None
    hidden_out = launch.kernel == "linear" and launch.what.endswith((" output", " down"))
    case = Case(launch.key, tuple(matrices), swiglu=swiglu, residual=hidden_out)
    sets = [[random_weight(*matrix, device) for matrix in matrices]]
    nbytes = sum(weight.nbytes for weight in sets[0])
    sets += [[random_weight(*m, device) for m in matrices] for _ in range(copies_of(nbytes, POOL_BYTES) - 1)]
    return linear_launches(case, sets, launch.tokens, device)


def _pools(pages: int, heads: int, int8: bool, device: torch.device) -> Iterator[KVCache]:
    while True:
        cache = KVCache.empty(pages, heads, int8=int8, device=device)
        for part in (cache.keys, cache.values):
            part.random_(0, 255) if int8 else part.normal_()
        for scales in (cache.key_scales, cache.value_scales):
            if scales is not None:
                scales.fill_(1 / 128)
        yield cache


def _attention(launch: Launch, device: torch.device) -> Calls:
    query_heads, kv_heads = map(int, launch.form.split("/"))
    int8, tokens, lanes = launch.kernel.endswith("int8"), launch.tokens, launch.lanes
    position = kv_heads * 2 * (DIM + 8 if int8 else 2 * DIM)
    positions = round(launch.kv / lanes / position)
    pages = -(-positions // PAGE)
    made = _pools(lanes * pages, kv_heads, int8, device)
    caches = [next(made) for _ in range(copies_of(launch.kv, POOL_BYTES))]
    tables = torch.randperm(lanes * pages, device=device).int().view(lanes, pages)
    sequences = Sequences.of(tables, [positions - tokens] * lanes, [tokens] * lanes)
    rows = lanes * tokens
    query = torch.randn(rows, query_heads, DIM, device=device).half()
    gate = torch.randn(rows, query_heads, 2 * DIM, device=device)[..., DIM:]
    bucket = next((bound for bound in BUCKETS if positions < bound), positions)
    wide = torch.nn.functional.pad(tables, (0, max(0, -(-bucket // PAGE) - pages)))
    sequences = Sequences(wide, sequences.starts, sequences.counts, sequences.firsts, sequences.positions)
    return [
        partial(decode_attention, query, cache, sequences, max_tokens=tokens, max_positions=bucket, gate=gate)
        for cache in caches
    ]


def _delta(launch: Launch, device: torch.device) -> Calls:
    key_heads, value_heads = map(int, launch.form.split("/"))
    tokens, lanes = launch.tokens, launch.lanes
    channels = (2 * key_heads + value_heads) * HEAD
    zeros = partial(torch.zeros, device=device)
    weights = DeltaWeights(torch.randn(channels, 4, device=device) / 2, zeros(value_heads), zeros(value_heads))
    memories = [DeltaState.empty(lanes, weights) for _ in range(48)]  # as many as a large model has layers
    progress = Progress.empty(lanes, device)
    progress.accepted.fill_(tokens)
    batch = Round.of(list(range(lanes)), [tokens] * lanes, device)
    joined = torch.randn(lanes * tokens, channels + value_heads * (HEAD + 2), device=device)
    mixed, _, b, a = joined.split([channels, value_heads * HEAD, value_heads, value_heads], dim=1)
    return [partial(delta_decode, mixed, a, b, weights, memory, progress, batch) for memory in memories]


def _rope(launch: Launch, device: torch.device) -> Calls:
    query_heads, kv_heads = map(int, launch.form.split("/"))
    tokens, int8 = launch.tokens, launch.kernel.endswith("int8")
    cache = next(_pools(4, kv_heads, int8, device))
    cosines, sines = rope_table(4096, inverse_frequencies(DIM, 2 * PAIRS / DIM, 1e7))
    axes = mrope_axes(PAIRS, [11, 11, 10]).int().to(device)
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    projection = torch.randn(tokens, (2 * query_heads + 2 * kv_heads) * DIM, device=device)
    norm, tables = torch.zeros(DIM, device=device), (cosines.to(device), sines.to(device))
    call = partial(qkv_rope, projection, norm, norm, tables, axes, slots.repeat(3, 1), slots, cache, _EPS)
    return [call] * _WARM_COPIES
