"""What stands between products, and a layer whose launches overlap."""

from functools import partial

import torch

from duovolt.kernels import checks, mailbox, norm, staging
from duovolt.kernels import module as mod
from duovolt.kernels.delta import DeltaState, DeltaWeights, Progress, delta_decode
from duovolt.kernels.delta import Round as DeltaRound
from duovolt.kernels.kvcache import DIM, PAGE, KVCache
from duovolt.kernels.linear import linear, linears, swiglu
from duovolt.kernels.reference import mrope_axes, rope_table
from duovolt.kernels.reference.rope import inverse_frequencies
from duovolt.kernels.rope import PAIRS, qkv_rope

from .launching import empty, generator, half, here, randn, run, touch, weight, zeros


def elementwise(native):
    for overlap in (False, True) if native else (False,):
        how = ", overlapping" if overlap else ""

        def norms(tokens):
            for columns in (8, 1032, 5120, 8192):
                x, more, own = (randn(tokens, columns) for _ in range(3))
                counts, wide = zeros(tokens, dtype=torch.int32), empty(tokens, columns)
                out = norm.rms_norm(x, own[0].clone(), 1e-6, delta=more, wide=wide, overflows=counts)
                touch(out, wide, x, norm.rms_norm(x, own[0].clone(), 1e-6))
                apart = randn(tokens, columns + 8)
                room = zeros(tokens, columns + 16, dtype=torch.float16)
                norm.rms_norm(apart[:, :columns], own[0].clone(), 1e-6, out=room[:, :columns])

        def gated(tokens):
            for heads in (1, 5, 24):
                gate = randn(tokens, heads * 128 + 4)[:, : heads * 128]
                counts = zeros(tokens, dtype=torch.int32)
                touch(norm.gated_rms_norm(randn(tokens, heads, 128), gate, randn(128), 1e-6, overflows=counts))

        def embed(tokens):
            ids = (torch.arange(tokens) % 66 - 1).int().to(here.device)  # two outside of the table
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for columns in (8, 136, 5120):
                    touch(norm.embed(ids, torch.randn(64, columns, generator=generator).to(dtype).to(here.device)))

        for tokens in (1, 3, 65):
            with mod.overlapping(overlap):
                run(f"rms_norm, {tokens} tokens{how}", partial(norms, tokens))
                run(f"gated_rms_norm, {tokens} tokens{how}", partial(gated, tokens))
                run(f"embed, {tokens} tokens{how}", partial(embed, tokens))
                for int8 in (True, False):
                    for heads in ((12, 2), (1, 1)):
                        run(
                            f"qkv_rope {'int8' if int8 else 'fp16'}, {heads}, {tokens} tokens{how}",
                            partial(rope, tokens, int8, heads),
                        )

    def gates():
        for tokens, heads in ((3, 2), (5, 12)):
            both = randn(tokens, heads, 2 * DIM)
            counts = zeros(tokens, dtype=torch.int32)
            touch(norm.output_gate(randn(tokens, heads, DIM, scale=5e4), both[:, :, DIM:], overflows=counts))

    run("output_gate", gates)

    def stage():
        for columns in (8, 264, 520, 2056):
            part, counts = half(3, columns), zeros(3, dtype=torch.int32)
            out = zeros(3, columns + 8)
            staging.widen(part, out[:, :columns], overflows=counts)
            both = half(5, 2 * columns)
            counts = zeros(5, dtype=torch.int32)
            touch(staging.silu_product(both[:, :columns], both[:, columns:], rests=(1.0, 1.6), overflows=counts))
            gate, up = half(5, columns), half(5, columns, scale=3e4)
            touch(staging.silu_product(gate, up, gate, overflows=counts))

    run("staging", stage)

    def probes():
        module = checks.module_on("probe.cu", here.device)
        module.launch("empty", 1, 1, ())
        module.launch("hold", 1, 1, (20,))
        module = checks.module_on("read.cu", here.device)
        never = zeros(1, dtype=torch.int32)
        for count, grid in ((1, 1), (5000, 2), (70001, 132)):
            data = torch.randint(0, 255, (16 * count,), dtype=torch.uint8).to(here.device)
            module.launch("read_plain", grid, 512, (data, never, count), 0, True)
            with mod.overlapping(native):
                module.launch("read_plain", grid, 512, (data, never, count), 0, True)
        mailbox.linger(2e-5, here.device)

    run("probe, read, linger", probes)


def rope(tokens, int8, heads):
    queries, kv = heads
    width = 2 * (queries + kv) * DIM
    tables = tuple(part.to(here.device) for part in rope_table(300, inverse_frequencies(DIM, 2 * PAIRS / DIM, 1e7)))
    axes = mrope_axes(PAIRS, [11, 11, 10]).int().to(here.device)
    positions = (torch.arange(3 * tokens).view(3, tokens) % 310).int().to(here.device)  # some outside of the tables
    slots = torch.randperm(4 * PAGE, generator=generator)[:tokens].int()
    if tokens > 2:
        slots[2] = -1
    cache = KVCache.empty(4, kv, int8=int8, device="cpu")
    cache = KVCache(
        *(
            None if part is None else part.to(here.device)
            for part in (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        )
    )
    counts = zeros(tokens, dtype=torch.int32)
    arguments = (
        randn(tokens, width + 32)[:, :width],
        randn(DIM),
        randn(DIM),
        tables,
        axes,
        positions,
        slots.to(here.device),
        cache,
        1e-6,
    )
    touch(qkv_rope(*arguments, overflows=counts))
    in_a_row = torch.arange(5, 5 + tokens).int().to(here.device)  # runs of positions, as prompts have them
    touch(qkv_rope(*arguments[:6], in_a_row, cache, 1e-6), cache.keys, cache.values)


def neighbours(native):
    """Launches that overlap, one after the other as in a round: what one writes the next reads."""
    if not native:
        return

    def layer(tokens):
        width = 1024
        x = randn(tokens, width)
        weights = DeltaWeights(randn(4 * 128, 4, scale=0.5), randn(2, scale=0.25), randn(2, scale=0.25))
        sizes = [weights.channels, 256, 2, 2]
        products = [weight("nvfp4" if rows > 2 else "half", rows, width) for rows in sizes]
        output, gate, up = weight("fp8", width, 256), weight("nvfp4", 256, width), weight("nvfp4", 256, width)
        own, small = randn(width), randn(128)
        memory, progress = DeltaState.empty(1, weights), Progress.empty(1, here.device)
        batch = DeltaRound.of([0], [tokens], here.device)
        joined = zeros(tokens, -(-sum(sizes) // 4) * 4)
        mixed, silu, b, a = joined[:, : sum(sizes)].split(sizes, dim=1)
        normed = empty(tokens, width, dtype=torch.float16)
        out, narrow = empty(tokens, 2, 128), empty(tokens, 256, dtype=torch.float16)
        gated = empty(tokens, 256, dtype=torch.float16)
        torch.cuda.synchronize()
        with mod.overlapping():
            norm.rms_norm(x, own, 1e-6, out=normed)
            linears(normed, products, [mixed, silu, b, a])
            delta_decode(mixed, a, b, weights, memory, progress, batch, out)
            norm.gated_rms_norm(out, silu, small, 1e-6, out=narrow)
            linear(narrow, output, x, residual=x)
            norm.rms_norm(x, own, 1e-6, out=normed)
            swiglu(normed, gate, up, gated)
            linear(gated, output, x, residual=x)
        touch(x, out)

    for tokens in (1, 4):
        run(f"a layer with the delta rule, overlapping, {tokens} tokens", partial(layer, tokens))
