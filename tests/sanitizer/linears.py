"""Linears in every encoding, form and way, dequantising."""

import torch

from duovolt.kernels import linear as lin
from duovolt.kernels import pair_pass, plain, prefill, tuning, wide
from duovolt.kernels.linear import linear, linears, swiglu
from duovolt.kernels.task import FLOAT, HALF, SWIGLU
from duovolt.kernels.tuning import Choice, using
from duovolt.kernels.weights import BAND

from .launching import (
    ENCODINGS,
    NATIVE,
    empty,
    half,
    here,
    launched,
    patched,
    processors,
    randn,
    right,
    run,
    touch,
    weight,
    zeros,
)


def _linear_forms(tokens, native):
    """Each encoding alone, with what follows; bands, and half bands where there are."""
    columns = 560  # uneven turns, and no slices
    x = half(tokens, columns)
    for encoding in ENCODINGS:
        rows = 51 if encoding == "half" else 64
        one, two = (weight(encoding, rows, columns) for _ in range(2))
        for each in (32, 16) if native and encoding in ("nvfp4", "fp8") else (32,):

            def go(encoding=encoding, one=one, two=two, rows=rows, each=each):
                with using(Choice(rows=each)):
                    wide = zeros(tokens, rows + 3)
                    linear(x, one, wide[:, :rows])
                    stream = randn(tokens, rows)
                    linear(x, one, stream, residual=stream)
                    counts = zeros(1, dtype=torch.int32)
                    narrow = linear(x, one, dtype=torch.float16, overflows=counts)
                    gated = swiglu(x, one, two, overflows=counts)
                    right(wide[:, :rows], lin.linear_reference, x, one)
                    right(gated, lin.swiglu_reference, x, one, two)
                    first, second = linears(x, [one, two])
                    touch(stream, narrow, gated, first, second, wide[:, :rows])
                    with processors(1), using(Choice(rows=each, blocks_a_sm=1)):  # a block has several items
                        again = linear(x, one)
                        touch(again, swiglu(x, one, two))
                        right(again, lin.linear_reference, x, one)
                    if encoding == "fp8" and each == 16:
                        with patched(tuning, _DEEP_BLOCKS=0):  # of the deep and the usual rings the other
                            touch(linear(x, one))

            run(f"linear {encoding}, rows {each}, {tokens} tokens", go)


def _linear_mixed(tokens):
    def go():
        columns = 560
        x = half(tokens, columns)
        sizes = {"fp8": 96, "nvfp4": 64, "half": 24, "fp8_blocks": 160}
        weights = [weight(encoding, rows, columns) for encoding, rows in sizes.items()]
        outs = [empty(tokens, rows) for rows in sizes.values()]
        linears(x, weights, outs)
        touch(*outs)
        for out, one in zip(outs, weights, strict=True):
            right(out, lin.linear_reference, x, one)
        wide = zeros(tokens, sum(sizes.values()) + 1)
        linears(x, weights, list(wide[:, :-1].split(list(sizes.values()), dim=1)))
        residuals = [randn(tokens, rows) for rows in sizes.values()]
        linears(x, weights, residuals, residuals=residuals)
        narrow = linears(x, weights[2:], dtype=torch.float16, overflows=zeros(1, dtype=torch.int32))
        touch(*narrow, *residuals)

    run(f"linears of mixed encodings, {tokens} tokens", go)


def _slices(tokens):
    """As on cards of few multiprocessors: whole bands, units, sums in rounds; and as on this one."""
    for columns in (4160, 5120):
        for count, rows in ((4, 352), (5, 352), (2, 576), (0, 64)):
            if columns == 5120 and count == 5:
                continue
            one, two = (weight("nvfp4", rows, columns) for _ in range(2))

            def go(one=one, two=two, rows=rows, columns=columns, count=count):
                x = half(tokens, columns)
                with processors(count):
                    assert lin._way(x, one) == lin._SLICES
                    stream = randn(tokens, rows)
                    linear(x, one, stream, residual=stream)
                    gated, other = swiglu(x, one, two), linears(x, [one, two])
                    right(gated, lin.swiglu_reference, x, one, two)
                    right(other[1], lin.linear_reference, x, two)
                    touch(*other, gated, stream)
                    touch(linear(x, one, dtype=torch.float16, overflows=zeros(1, dtype=torch.int32)))

            run(f"slices {rows} x {columns} by {count or 'all'}, {tokens} tokens", go)


def _one_pass(tokens):
    whole = lin.multiprocessors(0)
    cases = [(4, 128, 8192), (4, 160, 8192), (4, 160, 8704)]
    if here.tool != "race":
        cases.append((whole, 32 * (whole + whole // 4), 8192))
    for count, rows, columns in cases:

        def go(count=count, rows=rows, columns=columns):
            x, one = half(tokens, columns), weight("nvfp4", rows, columns)
            with processors(count):
                assert lin._way(x, one) == lin._ONE_PASS
                stream = randn(tokens, rows)
                linear(x, one, stream, residual=stream)
                out = linear(x, one)
                right(out, lin.linear_reference, x, one)
                touch(stream, out, linear(x, one, dtype=torch.float16))

        run(f"one pass {rows} x {columns} by {count}, {tokens} tokens", go)


def _pairs(tokens):
    whole = lin.multiprocessors(0)
    cases = [(4, 256, 4160), (16, 32 * 33, 4160), (4, 256, 5120)]
    if here.tool != "race":
        cases.append((whole, 32 * (2 * whole + whole // 16), 5120))
    for count, rows, columns in cases:

        def go(count=count, rows=rows, columns=columns):
            x = half(tokens, columns)
            gate, up = (weight("nvfp4", rows, columns) for _ in range(2))
            with processors(count):
                before = launched[lin.SOURCES[8], pair_pass.KERNEL, NATIVE]
                out = swiglu(x, gate, up, overflows=zeros(1, dtype=torch.int32))
                right(out, lin.swiglu_reference, x, gate, up)
                touch(out)
                assert launched[lin.SOURCES[8], pair_pass.KERNEL, NATIVE] > before, "another way"

        run(f"gate and up in one pass {rows} x {columns} by {count}, {tokens} tokens", go)


def linear_8(native):
    for tokens in (3, 8):
        _linear_forms(tokens, native)
    for tokens in (1, 8):
        _linear_mixed(tokens)


def linear_ways(native):
    """Slices, one pass, pairs."""
    if not native:
        return
    for tokens in (1, 8):
        _pairs(tokens)
        _one_pass(tokens)
        _slices(tokens)


def linear_more(native):
    """Nine tokens and more."""
    for tokens in (9, 16, 17, 24):
        if native or tokens in (9, 24):
            _linear_forms(tokens, native)
            _linear_mixed(tokens)
        if native:
            for count, rows, columns in ((0, 96, 4160), (0, 64, 5120), (4, 160, 8192)):

                def go(tokens=tokens, count=count, rows=rows, columns=columns):
                    x = half(tokens, columns)
                    one, two = (weight("nvfp4", rows, columns) for _ in range(2))
                    with processors(count):
                        assert lin._way(x, one) == (lin._ONE_PASS if count else lin._SLICES)
                        stream = randn(tokens, rows)
                        linear(x, one, stream, residual=stream)
                        both = linears(x, [one, two])
                        right(both[1], lin.linear_reference, x, two)
                        touch(stream, *both, swiglu(x, one, two))

                run(f"sliced bands {rows} x {columns}, {tokens} tokens", go)


def wide_linear(native):
    cases = [("nvfp4", (27, 45, 61, 100)), ("fp8", (27, 45, 61, 100)), ("fp8_blocks", (27, 61)), ("half", (27, 61))]
    for encoding, counts in cases:
        for tokens in counts if native else counts[:3]:

            def go(encoding=encoding, tokens=tokens):
                for few, bands, groups in ((3, 12, 19), (3, 32, 5), (0, 2, 5), (0, 2, 19)):
                    rows = 32 * bands - (12 if encoding == "half" else 0)
                    x, one = half(tokens, 16 * groups), weight(encoding, rows, 16 * groups)
                    with processors(few, wide, "processors"):
                        out = empty(tokens, rows)
                        wide.multiply(x, [one], [out], FLOAT)
                        right(out, prefill.linear_block_reference, x, one)
                        touch(out)
                    if bands == 2 or (few, groups) == (3, 5):
                        narrow, gated = (empty(tokens, rows, dtype=torch.float16) for _ in range(2))
                        counts = zeros(tokens, dtype=torch.int32)
                        with processors(few, wide, "processors"):
                            wide.multiply(x, [one], [narrow], HALF, overflows=counts)
                            wide.multiply(x, [one, one], [gated], SWIGLU, overflows=counts)
                        touch(narrow, gated)

            run(f"wide {encoding}, {tokens} tokens", go)

    def several():
        x = half(40, 144)
        weights = [weight("fp8", rows, 144) for rows in (96, 32, 416, 64)]
        outs = [empty(40, one.shape[0]) for one in weights]
        with processors(3, wide, "processors"):
            wide.multiply(x, weights, outs, FLOAT)
        touch(*outs)

    run("wide, several matrices", several)


def _plain_rows(one, first, count):
    """At the factor that is asked for below."""
    return 4.0 * (one.values() * one.scale.reshape(-1, 1))[first:][:count]


def dequantising(native):
    for encoding in ENCODINGS:

        def go(encoding=encoding):
            rows = 147 if encoding == "half" else 160
            for columns in (16, 560, 304):
                one = weight(encoding, rows, columns)
                for first, bands in ((0, 5), (1, 2), (4, 1)):
                    out = empty(bands * BAND, columns, dtype=torch.float16)
                    plain.dequantise(one, out, first, 4.0)
                    rows_in = min(bands * BAND, rows - first * BAND)
                    right(out[:rows_in], _plain_rows, one, first * BAND, rows_in)
                    touch(out)

        run(f"dequantise {encoding}", go)
