"""Attention, delta rule, elementwise kernels and sampling at the 27B's shapes on a rank of two, measured as `perf.kernels`
measures linears: cold, in captured graphs, beside a plain read of as many bytes and, where there is one, beside a peer.

Bytes are those that an operation must read and write once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ..kernels import norm, reference
from ..kernels.attention import Sequences, decode_attention
from ..kernels.delta import HEAD, DeltaState, DeltaWeights, Progress, Round, delta_decode, delta_prefill
from ..kernels.kvcache import DIM, PAGE, KVCache
from ..kernels.linear import linear, linears
from ..kernels.logprobs import log_probabilities
from ..kernels.module import forced_arch, overlapping, overlaps
from ..kernels.prefill_attention import gather, prefill_attention
from ..kernels.rope import qkv_rope
from ..kernels.sampling import decide
from ..kernels.sampling_state import Cuts, Decision, Distributions, Drawn, LaneSampling
from ..kernels.weights import Weight
from .kernels import CASES, cold_copies, random_weight, read_seconds, time_graph

POOL_BYTES = 512 << 20
HIDDEN, Q_HEADS, KV_HEADS, KEY_HEADS, VALUE_HEADS, VOCABULARY = 5120, 12, 2, 8, 24, 248320
EPS = 1e-6


@dataclass(frozen=True)
class Measurement:
    """What to launch, over copies that are together larger than the caches. `flops`: of products, where they count. `overlap`:
    how they are launched, where they say so themselves."""

    name: str
    nbytes: int
    launches: Sequence[Callable[[], object]]
    peer: Sequence[Callable[[], object]] = ()
    peer_name: str = ""
    flops: int = 0
    overlap: bool | None = None


@dataclass(frozen=True)
class FamilyRow:
    """Seconds a call, of plain reads of its bytes launched likewise (`overlap`: before the one before has ended) and in turn, and
    of the peer (0: there is none)."""

    family: str
    name: str
    arch: str
    nbytes: int
    flops: int
    seconds: float
    overlap: bool
    floor: float
    floor_in_turn: float
    peer: float
    peer_name: str

    @property
    def ratio(self) -> float:
        """Share of the speed of the plain read that is launched likewise."""
        return self.floor / self.seconds

    @property
    def ratio_in_turn(self) -> float:
        """Share of the speed of the plain read in turn."""
        return self.floor_in_turn / self.seconds


def _copies(nbytes: int) -> int:
    return cold_copies(nbytes, POOL_BYTES, 32)


def _cache(positions: int, device: torch.device, *, int8: bool) -> KVCache:
    """A pool of random words in small numbers."""
    cache = KVCache.empty(positions // PAGE, KV_HEADS, int8=int8, device=device)
    if cache.key_scales is not None and cache.value_scales is not None:
        cache.keys.random_(1, 256)
        cache.values.random_(1, 256)
        cache.key_scales.fill_(0.01)
        cache.value_scales.fill_(0.01)
    else:
        cache.keys.normal_()
        cache.values.normal_()
    return cache


def attention(device: torch.device) -> Iterator[Measurement]:
    """Decode at depth, and a prompt's chunk against torch's attention on keys and values that stand in a row."""
    from torch.nn.attention.bias import causal_lower_right  # takes seconds, and only this needs it

    for form, positions, counts in (("int8", 186_048, (1, 2, 4, 6)), ("int8", 32_000, (1, 4)), ("fp16", 186_048, (4,))):
        int8 = form == "int8"
        nbytes = positions * KV_HEADS * (2 * DIM + 16 if int8 else 4 * DIM)
        caches = [_cache(positions, device, int8=int8) for _ in range(_copies(nbytes))]
        table = torch.randperm(positions // PAGE, device=device, dtype=torch.int32)[None]
        for tokens in counts:
            query = torch.randn(tokens, Q_HEADS, DIM, device=device).half()
            where = Sequences.of(table, [positions - tokens], [tokens])
            call = partial(decode_attention, query, max_tokens=tokens, max_positions=positions, sequences=where)
            name = f"decode {form}, {positions:,} positions, {tokens} tokens"
            yield Measurement(name, nbytes, [partial(call, cache=cache) for cache in caches])
        del caches
    for positions in (32_768, 131_072):
        cache, tokens = _cache(positions, device, int8=True), 2048
        table = torch.randperm(positions // PAGE, device=device, dtype=torch.int32)
        query = torch.randn(tokens, Q_HEADS, DIM, device=device).half()
        keys, values = gather(cache, table, positions)
        theirs = partial(
            torch.nn.functional.scaled_dot_product_attention,
            *(query.transpose(0, 1)[None], keys[None], values[None]),
            attn_mask=causal_lower_right(tokens, positions),
            scale=DIM**-0.5,
            enable_gqa=True,
        )
        yield Measurement(
            f"prefill int8, 2,048 tokens at {positions:,}",
            positions * KV_HEADS * (2 * DIM + 16),
            [partial(prefill_attention, query, cache, table, positions - tokens)],
            [theirs],
            "torch, keys in a row",
            4 * Q_HEADS * DIM * tokens * (positions - tokens // 2),
        )


def _delta_parts(tokens: int, device: torch.device) -> tuple[DeltaWeights, Tensor, Tensor, Tensor]:
    channels = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
    weights = DeltaWeights(
        torch.randn(channels, 4, device=device),
        torch.zeros(VALUE_HEADS, device=device),
        torch.zeros(VALUE_HEADS, device=device) - 3,
    )
    projection = torch.randn(tokens, channels + VALUE_HEADS * (HEAD + 2), device=device)
    mixed, _, b, a = projection.split([channels, VALUE_HEADS * HEAD, VALUE_HEADS, VALUE_HEADS], dim=1)
    return weights, mixed, a, b


def delta(device: torch.device) -> Iterator[Measurement]:
    """A round of decoding of one, two and four lanes with as many tokens replayed, and a prompt's chunk in both forms."""
    for lanes, tokens in product((1, 2, 4), (1, 4)):
        weights, mixed, a, b = _delta_parts(lanes * tokens, device)
        nbytes = lanes * (2 * VALUE_HEADS * HEAD * HEAD * 4 + 4 * mixed.shape[1] * (4 * tokens + 2 * 3))
        states = [DeltaState.empty(lanes, weights) for _ in range(_copies(nbytes))]
        progress = Progress.empty(lanes, device)
        progress.accepted.fill_(tokens)
        batch = Round.of(list(range(lanes)), [tokens] * lanes, device)
        calls = [partial(delta_decode, mixed, a, b, weights, state, progress, batch) for state in states]
        each = f"{lanes} lanes, each " if lanes > 1 else ""
        yield Measurement(f"decode, {each}{tokens} tokens and {tokens} replayed", nbytes, calls)
    weights, mixed, a, b = _delta_parts(2048, device)
    state, progress = DeltaState.empty(1, weights), Progress.empty(1, device)
    plain = partial(delta_prefill, mixed, a, b, weights, state, progress, 0)
    nbytes = 4 * 2048 * (mixed.shape[1] + VALUE_HEADS * HEAD)
    yield Measurement("prefill, 2,048 tokens, chunked", nbytes, [partial(plain, chunked=True)], [plain], "recurrent")


def _turning(device: torch.device) -> Callable[..., Tensor]:
    """`qkv_rope` without a projection and places, into an int8 cache of its own."""
    cosines, sines = reference.rope_table(4096, reference.inverse_frequencies(DIM, 0.25, 1e7))
    return partial(
        qkv_rope,
        query_weight=torch.randn(DIM, device=device),
        key_weight=torch.randn(DIM, device=device),
        tables=(cosines.to(device), sines.to(device)),
        axes=reference.mrope_axes(32, [11, 11, 10]).int().to(device),
        cache=_cache(8192, device, int8=True),
        eps=EPS,
    )


def elementwise(device: torch.device) -> Iterator[Measurement]:
    """What stands between the products."""
    for tokens in (4, 2048):
        sets = _copies(tokens * HIDDEN * 8)
        x, more = (torch.randn(sets, tokens, HIDDEN, device=device) for _ in range(2))
        weight = torch.randn(HIDDEN, device=device)
        out = torch.empty(tokens, HIDDEN, dtype=torch.float16, device=device)  # one for all layers, as a round has it
        calls: list[Callable[[], object]]
        calls = [partial(norm.rms_norm, x[i], weight, EPS, delta=more[i], out=out) for i in range(sets)]
        yield Measurement(f"rms_norm with delta, {tokens:,} tokens", tokens * HIDDEN * 14, calls)
        wide = VALUE_HEADS * HEAD
        heads, gate = x[:, :, :wide].contiguous().unflatten(2, (VALUE_HEADS, HEAD)), more[:, :, :wide].contiguous()
        small, narrow = torch.randn(HEAD, device=device), out[:, :wide].contiguous()
        calls = [partial(norm.gated_rms_norm, heads[i], gate[i], small, EPS, out=narrow) for i in range(sets)]
        yield Measurement(f"gated_rms_norm, {tokens:,} tokens", tokens * wide * 10, calls)
        table = torch.randn(VOCABULARY // 4, HIDDEN, device=device).bfloat16()
        ids = torch.randint(0, VOCABULARY // 4, (sets, tokens), device=device, dtype=torch.int32)
        calls = [partial(norm.embed, ids[i], table, x[i]) for i in range(sets)]
        yield Measurement(f"embed, {tokens:,} tokens", tokens * HIDDEN * 6, calls)
        width = 2 * (Q_HEADS + KV_HEADS) * DIM
        projection = torch.randn(sets, tokens, width, device=device)
        # Places and slots are the same in all layers of a round, and one buffer holds the queries of each in turn.
        places = torch.arange(tokens, device=device, dtype=torch.int32)
        turn = partial(_turning(device), positions=places.expand(3, tokens).contiguous(), slots=places)
        query = torch.empty(tokens, Q_HEADS, DIM, dtype=torch.float16, device=device)
        calls = [partial(turn, part, out=query) for part in projection]
        nbytes = tokens * DIM * (4 * (Q_HEADS + 2 * KV_HEADS) + 2 * Q_HEADS) + tokens * KV_HEADS * (2 * DIM + 16)
        yield Measurement(f"qkv_rope int8, {tokens:,} tokens", nbytes, calls)


def sampling(device: torch.device) -> Iterator[Measurement]:
    """A round of speculation of one lane, and log-probabilities."""
    rows = 4
    logits = torch.randn(rows, VOCABULARY, device=device) * 3
    lanes = LaneSampling.empty(1, VOCABULARY, device, bias=False)
    lanes.start(0, [1], temperature=0.8, top_k=40, top_p=0.95)
    decision = Decision.of([0], [9], [[1, 2, 3]], device)
    into, drawn = Distributions.empty(rows, VOCABULARY, device), Drawn.empty(1, device)
    forms = {"top-k and top-p": Cuts(listed=True), "top-p": Cuts(top_k=False), "no cut": Cuts(top_k=False, top_p=False)}
    forms["greedy"] = Cuts(top_k=False, top_p=False, greedy=True)
    for what, cuts in forms.items():
        if cuts.greedy:
            lanes.temperature.zero_()
        call = partial(decide, logits, decision, lanes, into, cuts=cuts, counted=False, drawn=drawn)
        yield Measurement(f"round of 4 rows, {what}", rows * VOCABULARY * 4, [call] * 4)
    tokens = torch.zeros(rows, dtype=torch.int32, device=device)
    yield Measurement(
        "log-probabilities of 4 rows", rows * VOCABULARY * 4, [partial(log_probabilities, logits, tokens, 5)] * 4
    )


def neighbours(device: torch.device) -> Iterator[Measurement]:
    """What the delta rule and rotary embedding add to a round: the launches that stand beside each, with it and without.

    Norm, projection, the operation (with its gated norm), output projection, cold weights; one after the other, and as in a
    captured round, where launches overlap. The time is of all of them; the difference to the peer is what the operation adds.
    """
    projections = {case.name: case.matrices for case in CASES if case.name in ("delta in", "attention in", "mixer out")}
    for tokens in (1, 4):
        for what, name in (("delta rule", "delta in"), ("qkv_rope", "attention in")):
            layers = _copies(
                sum(rows * columns for _, rows, columns in (*projections[name], *projections["mixer out"]))
            )
            walk = _delta_layer if what == "delta rule" else _attention_layer
            steps = [walk(tokens, projections[name], projections["mixer out"][0], device) for _ in range(layers)]
            nbytes = steps[0].nbytes
            for overlap in (False, True):
                how = "overlapping" if overlap else "in turn"
                with_it, without = ([partial(one.run, overlap, whole) for one in steps] for whole in (True, False))
                name = f"{what} and neighbours, {how}, {tokens} tokens"
                yield Measurement(name, nbytes, with_it, without, "without it", overlap=overlap)
            del steps, with_it, without


@dataclass(frozen=True)
class _Neighbours:
    """Launches in a row; `own`: which of them are the operation's."""

    launches: Sequence[Callable[[], object]]
    own: Collection[int]
    nbytes: int

    def run(self, overlap: bool, whole: bool) -> None:
        with overlapping(overlap):
            for number, launch in enumerate(self.launches):
                if whole or number not in self.own:
                    launch()


def _small_weight(matrix: tuple[str, int, int], device: torch.device) -> Weight:
    """Random, with products that fp16 holds."""
    weight = random_weight(*matrix, device)
    weight.scale.fill_(2.0**-14)
    return weight


def _delta_layer(
    tokens: int, matrices: Sequence[tuple[str, int, int]], last: tuple[str, int, int], device: torch.device
) -> _Neighbours:
    weights, _, _, _ = _delta_parts(tokens, device)
    x = torch.randn(tokens, HIDDEN, device=device)
    normed, narrow = (torch.empty(tokens, n, dtype=torch.float16, device=device) for n in (HIDDEN, VALUE_HEADS * HEAD))
    widths = [rows for _, rows, _ in matrices]
    projection = torch.zeros(tokens, -(-sum(widths) // 4) * 4, device=device)
    mixed, gate, b, a = projection[:, : sum(widths)].split(widths, dim=1)
    products, output = [_small_weight(matrix, device) for matrix in matrices], _small_weight(last, device)
    state, progress = DeltaState.empty(1, weights), Progress.empty(1, device)
    progress.accepted.fill_(tokens)
    out = torch.empty(tokens, VALUE_HEADS, HEAD, device=device)
    small, batch = torch.ones(HEAD, device=device), Round.of([0], [tokens], device)
    launches = (
        partial(norm.rms_norm, x, torch.zeros(HIDDEN, device=device), EPS, out=normed),
        partial(linears, normed, products, [mixed, gate, b, a]),
        partial(delta_decode, mixed, a, b, weights, state, progress, batch, out),
        partial(norm.gated_rms_norm, out, gate, small, EPS, out=narrow),
        partial(linear, narrow, output, x, residual=x),
    )
    return _Neighbours(launches, {2}, sum(w.nbytes for w in (*products, output)) + 2 * state.state.nbytes)


def _attention_layer(
    tokens: int, matrices: Sequence[tuple[str, int, int]], last: tuple[str, int, int], device: torch.device
) -> _Neighbours:
    x = torch.randn(tokens, HIDDEN, device=device)
    normed = torch.empty(tokens, HIDDEN, dtype=torch.float16, device=device)
    query = torch.zeros(tokens, Q_HEADS, DIM, dtype=torch.float16, device=device)
    widths = [rows for _, rows, _ in matrices]
    projection = torch.zeros(tokens, sum(widths), device=device)
    products, output = [_small_weight(matrix, device) for matrix in matrices], _small_weight(last, device)
    places = torch.arange(tokens, device=device, dtype=torch.int32)
    launches = (
        partial(norm.rms_norm, x, torch.zeros(HIDDEN, device=device), EPS, out=normed),
        partial(linears, normed, products, list(projection.split(widths, dim=1))),
        partial(_turning(device), projection, positions=places.expand(3, tokens).contiguous(), slots=places, out=query),
        partial(linear, query.flatten(1), output, x, residual=x),
    )
    return _Neighbours(launches, {2}, sum(w.nbytes for w in (*products, output)))


FAMILIES = {
    "attention": attention,
    "delta": delta,
    "elementwise": elementwise,
    "sampling": sampling,
    "neighbours": neighbours,
}


def measure_families(
    names: Sequence[str], arch: str, device: torch.device, *, overlap: bool = False
) -> Iterator[FamilyRow]:
    """Every measurement of these families as code of one architecture; `overlap`: launches begin before the one before has
    ended, where they may (those of `neighbours` say so themselves)."""
    with forced_arch(arch):
        for family in names:
            for one in FAMILIES[family](device):
                seconds = time_graph(one.launches, overlap)
                peer = time_graph(one.peer, overlap) if one.peer else 0.0
                early = overlaps(arch) and (overlap if one.overlap is None else one.overlap)
                in_turn = read_seconds(one.nbytes, device, POOL_BYTES)
                floor = read_seconds(one.nbytes, device, POOL_BYTES, overlap=True) if early else in_turn
                facts = family, one.name, arch, one.nbytes, one.flops
                yield FamilyRow(*facts, seconds, early, floor, in_turn, peer, one.peer_name)
