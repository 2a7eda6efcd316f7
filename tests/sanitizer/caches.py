"""Attention over the paged cache, and the delta rule."""

from functools import partial

import torch

from duovolt.kernels import checks, delta
from duovolt.kernels import prefill_attention as pre
from duovolt.kernels.attention import Sequences, decode_attention
from duovolt.kernels.delta import DeltaState, DeltaWeights, Progress, delta_decode, delta_prefill
from duovolt.kernels.delta import Round as DeltaRound
from duovolt.kernels.kvcache import DIM, PAGE, KVCache
from duovolt.kernels.plain_attention import plain_attention, plain_prefill_attention

from .launching import generator, half, here, patched, randn, run, touch


def _cache(int8, kv, pages, positions):
    cache = KVCache.empty(len(pages), kv, int8=int8, device="cpu")
    slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(positions)])
    cache.store(slots, *(torch.randn(positions, kv, DIM, generator=generator) for _ in range(2)))
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return KVCache(*(None if part is None else part.to(here.device) for part in parts))


def attending(native):
    pages = [2, 0, 1]
    for int8 in (True, False):
        form = "int8" if int8 else "fp16"
        for tokens in (1, 2, 4, 5, 6, 8):  # tiles 1, 2, 3, 4, 5 and two passes of 3

            def go(int8=int8, tokens=tokens):
                cache = _cache(int8, 2, pages, 150)
                where = Sequences.of(
                    torch.tensor([pages, pages], dtype=torch.int32).to(here.device), [150 - tokens, 60], [tokens, 1]
                )
                query = half(tokens + 1, 12, DIM, scale=0.25)
                gate = randn(tokens + 1, 12, 2 * DIM)[:, :, DIM:]
                for own in (None, gate):
                    touch(decode_attention(query, cache, where, max_tokens=tokens, max_positions=160, gate=own))

            run(f"attention {form}, {tokens} tokens", go)

        def alike(int8=int8):
            cache = _cache(int8, 2, pages, 150)
            table = torch.tensor(pages, dtype=torch.int32).to(here.device)
            touch(*pre.gather(cache, table, 150), *pre.gather(cache, table, 1))
            for tokens in (1, 30):
                query, gate = half(tokens, 12, DIM, scale=0.25), randn(tokens, 12, DIM)
                touch(pre.prefill_attention(query, cache, table, 150 - tokens, own=True))
                touch(pre.prefill_attention(query, cache, table, 150 - tokens, own=True, gate=gate))
            query = half(3, 12, DIM, scale=0.25)
            where = Sequences.of(table[None], [147], [3])
            touch(plain_attention(query, cache, where, max_tokens=3, max_positions=160))
            touch(plain_prefill_attention(query, cache, table, 147, gate=randn(3, 12, DIM)))

        run(f"gather, attention of a prompt and in the plain way, {form}", alike)


def delta_rule(native):
    weights = DeltaWeights(randn(4 * 128, 4, scale=0.5), randn(2, scale=0.25), randn(2, scale=0.25))

    def parts(tokens):
        return randn(tokens, weights.channels + 4).split([weights.channels, 2, 2], dim=1)

    def decode():
        memory, progress = DeltaState.empty(2, weights), Progress.empty(2, here.device)
        for counts, accepted in (([2, 3], [1, 3]), ([8, 1], [8, 1]), ([4], [0])):
            touch(
                delta_decode(
                    *parts(sum(counts)),
                    weights,
                    memory,
                    progress,
                    DeltaRound.of(list(range(len(counts))), counts, here.device),
                )
            )
            for lane, one in enumerate(accepted):
                progress.advance(lane, one)

    run("delta_decode", decode)
    if native:
        with patched(
            delta,
            _decoder=lambda device: (checks.module_on(delta.SOURCE, device), "delta_decode", delta._THREADS, False),
        ):
            run("delta_decode in turn", decode)

    def prompt(chunked):
        memory, progress, position = DeltaState.empty(1, weights), Progress.empty(1, here.device), 0
        for tokens in (90, 40):
            touch(delta_prefill(*parts(tokens), weights, memory, progress, 0, chunked=chunked, position=position))
            position += tokens
        touch(memory.state)

    for chunked in (False, True):
        run(f"delta_prefill {'in chunks' if chunked else 'token by token'}", partial(prompt, chunked))
