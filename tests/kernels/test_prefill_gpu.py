"""Linears of many tokens on a GPU, by every way, against a float64 oracle; both builds."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import plain_ahead, prefill
from duovolt.kernels.linear import linear
from duovolt.kernels.plain_ahead import PlainAhead
from duovolt.kernels.plain_kept import PlainKept
from duovolt.kernels.prefill import linear_block, linear_blocks, swiglu_block
from duovolt.kernels.tuning import Choice, using

from .test_linear_gpu import ENCODINGS, activations, arch, bits, matrix, on_gpu  # noqa: F401  (arch: every test is run with it)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOKENS = (24, 25, 31, 32, 33, 48, 49, 63, 64, 65, 96, 97, 128, 129, 200, 256, 300)
SHAPES = (
    (352, 560),
    (5120, 3072),
    (4128, 1024),
)  # uneven ends; real; whole tiles for no card, and a last one that is short
WAYS = {
    "wide": Choice(wide_from=1, wide_up_to=4096),
    "narrow": Choice(wide_up_to=0),
    "beside": Choice(wide_up_to=0, overlap_dequantising=True),
}
HALF_ERROR, SUM_ERROR = 1e-3, 2e-5  # relative L2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that small matrices have pieces enough to go side by side."""
    monkeypatch.setattr(prefill, "BESIDE_ROWS", 64)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_way_against_float64(encode, encoding, shape):
    rng = np.random.default_rng(shape[0])
    sample = encode(encoding, matrix("normal", (shape[0] - (13 if encoding == "half" else 0), shape[1]), rng))
    weight, exact = on_gpu(sample.weight), torch.from_numpy(sample.exact).cuda()
    x = activations("normal", shape[1], rng, max(TOKENS))
    expected = x.double() @ exact.t()
    for tokens in TOKENS:
        for way, chosen in WAYS.items():
            with using(chosen):
                guarded = torch.full((tokens + 2, exact.shape[0]), -7.0, dtype=torch.float16, device="cuda")
                got = linear_block(x[:tokens], weight, guarded[1:-1])
                again = linear_block(x[:tokens], weight)
            assert (guarded[0] == -7).all() and (guarded[-1] == -7).all(), (way, tokens)
            error = float((got.double() - expected[:tokens]).norm() / expected[:tokens].norm())
            assert error <= HALF_ERROR, (way, tokens, error)
            assert torch.equal(bits(got), bits(again)), (way, tokens)


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_a_token_has_the_same_bits_anywhere_in_the_wide_linear(encode, encoding):
    rng = np.random.default_rng(3)
    weight = on_gpu(encode(encoding, matrix("normal", (5120, 3072), rng)).weight)
    x = activations("normal", 3072, rng, 190)
    with using(WAYS["wide"]):
        whole = linear_block(x, weight)
        turned = linear_block(x.roll(77, 0), weight)
        assert torch.equal(bits(turned), bits(whole.roll(77, 0)))
        other = x.clone()
        other[:100] = activations("heavy", 3072, rng, 100)
        assert torch.equal(bits(linear_block(other, weight)[100:]), bits(whole[100:]))
        fewer = linear_block(x[:140], weight)  # as many token blocks
        assert torch.equal(bits(fewer), bits(whole[:140]))


@pytest.mark.parametrize("way", WAYS)
def test_several_matrices_into_columns_and_gates(encode, way):
    rng = np.random.default_rng(4)
    rows = {"fp8": 416, "nvfp4": 96, "half": 24, "bf16": 24, "fp8_blocks": 128}
    samples = [encode(kind, matrix("normal", (count, 1024), rng)) for kind, count in rows.items()]
    x = activations("normal", 1024, rng, 100)
    wide = torch.full((100, sum(rows.values()) + 4), -7.0, device="cuda")
    outs = list(wide[:, :-4].split(list(rows.values()), dim=1))
    with using(WAYS[way]):
        linear_blocks(x, [on_gpu(sample.weight) for sample in samples], outs)
    assert (wide[:, -4:] == -7).all()
    for sample, out in zip(samples, outs, strict=True):
        expected = x.double() @ torch.from_numpy(sample.exact).cuda().t()
        error = float((out.double() - expected).norm() / expected.norm())
        assert error <= (SUM_ERROR if way == "wide" else HALF_ERROR), sample.weight.encoding
    gate, up = (encode("nvfp4", matrix("normal", (2080, 1024), rng) / 20) for _ in range(2))
    opened, raised = (x.double() @ torch.from_numpy(part.exact).cuda().t() for part in (gate, up))
    expected = opened * torch.sigmoid(opened) * raised
    counts = torch.zeros(100, dtype=torch.int32, device="cuda")
    with using(WAYS[way]):
        got = swiglu_block(x, on_gpu(gate.weight), on_gpu(up.weight), overflows=counts)
        assert float((got.double() - expected).norm() / expected.norm()) <= 3 * HALF_ERROR and not counts.any()
        loud = x.clone()
        loud[7] *= 1000
        got = swiglu_block(loud, on_gpu(gate.weight), on_gpu(up.weight), overflows=counts)
    assert torch.isfinite(got).all() and counts[7] > 0 and counts.sum() == counts[7]


@pytest.mark.parametrize("tokens", [25, 48, 97, 200])
def test_sums_are_not_cut_off_where_torch_gives_them(encode, tokens):
    """As the delta rule's four matrices, side by side in one product; loud rows stay what they are, outputs apart go alone."""
    rng = np.random.default_rng(10)
    shapes = (("fp8", 416), ("fp8", 96), ("half", 24), ("half", 24))
    samples = [encode(kind, matrix("normal", (rows, 1024), rng)) for kind, rows in shapes]
    weights = [on_gpu(sample.weight) for sample in samples]
    x = activations("normal", 1024, rng, tokens)
    x[7] *= 3000
    wide = torch.full((tokens, 568), -7.0, device="cuda")
    outs = list(wide[:, :560].split([416, 96, 24, 24], dim=1))
    apart, counts = torch.zeros(tokens, 416, device="cuda"), torch.zeros(tokens, dtype=torch.int32, device="cuda")
    with using(WAYS["narrow"]):
        linear_blocks(x, [*weights, weights[0]], [*outs, apart], overflows=counts)
    assert (wide[:, 560:] == -7).all()
    for sample, out in zip([*samples, samples[0]], [*outs, apart], strict=True):
        expected = x.double() @ torch.from_numpy(sample.exact).cuda().t()
        quiet = torch.arange(tokens) != 7
        assert float((out.double() - expected)[quiet].norm() / expected[quiet].norm()) <= HALF_ERROR, (
            sample.weight.encoding
        )
        if prefill._gives_float32() or tokens <= prefill.FEW_TOKENS:
            assert float((out.double() - expected)[7].norm() / expected[7].norm()) <= HALF_ERROR
    cut = not prefill._gives_float32() and tokens > prefill.FEW_TOKENS
    assert (wide[7, :560].abs().max() > 65504) != cut and counts.any() == cut


def test_pieces_side_by_side_give_what_pieces_in_turn_give(encode, monkeypatch):
    """Many small pieces, so that each half of the scratch is used again and again, with other work before and after."""
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * 32 * 1024 * 4)
    rng = np.random.default_rng(5)
    sample = encode("nvfp4", matrix("normal", (32 * 61, 1024), rng))
    weight, x = on_gpu(sample.weight), activations("normal", 1024, rng, 600)
    expected = x.double() @ torch.from_numpy(sample.exact).cuda().t()
    for _ in range(20):
        with using(WAYS["beside"]):
            got = linear_block(x * 1.0, weight)
        assert float((got.double() - expected).norm() / expected.norm()) <= HALF_ERROR
        with using(WAYS["wide"]):
            assert float((linear_block(x, weight).double() - expected).norm() / expected.norm()) <= HALF_ERROR


@pytest.mark.parametrize("way", WAYS)
def test_captured_in_a_graph(encode, way):
    rng = np.random.default_rng(6)
    weight, x = on_gpu(encode("fp8", matrix("normal", (608, 560), rng)).weight), activations("normal", 560, rng, 130)
    with using(WAYS[way]):
        expected = linear_block(x, weight)
        out = torch.zeros_like(expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            linear_block(x, weight, out)
    assert (out == 0).all()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("streams", ["one", "two"])
@pytest.mark.parametrize("way", WAYS)
def test_two_threads_at_once(encode, way, streams):
    """What two ranks in one process do: their launches come in any order, on one stream or beside each other on two."""
    rng = np.random.default_rng(8)
    kinds = ("nvfp4", "fp8")
    weights = [on_gpu(encode(kind, matrix("normal", (2080, 1040), rng)).weight) for kind in kinds]
    inputs = [activations("normal", 1040, rng, 200 + 56 * number) for number in range(2)]
    with using(WAYS[way]):
        expected = [linear_block(x, weight) for x, weight in zip(inputs, weights, strict=True)]
    torch.cuda.synchronize()
    begin = threading.Barrier(2, timeout=60)

    def work(number: int) -> list[torch.Tensor]:
        stream = torch.cuda.Stream() if streams == "two" else torch.cuda.default_stream()
        with torch.cuda.stream(stream), using(WAYS[way]):
            begin.wait()
            found = [linear_block(inputs[number], weights[number]) for _ in range(50)]
            stream.synchronize()
        return found

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(copy_context().run, work, number) for number in range(2)]  # the architecture comes along
        for number, run in enumerate(running):
            assert all(torch.equal(bits(one), bits(expected[number])) for one in run.result()), kinds[number]


def test_a_capture_beside_another_thread(encode):
    """A graph's launches are its own: the other thread's run now, and what it computes is not replayed."""
    rng = np.random.default_rng(9)
    weight = on_gpu(encode("fp8", matrix("normal", (1056, 1040), rng)).weight)
    x = activations("normal", 1040, rng, 200)
    with using(WAYS["beside"]):
        expected = linear_block(x, weight)
    outs = [torch.zeros_like(expected) for _ in range(2)]
    torch.cuda.synchronize()
    begun, done = threading.Event(), threading.Event()

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()), using(WAYS["beside"]):
            begun.wait(60)
            for _ in range(20):
                linear_block(x, weight, outs[1])
            torch.cuda.current_stream().synchronize()
        done.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(copy_context().run, other)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream), using(WAYS["beside"]):
            graph.capture_begin(capture_error_mode="thread_local")
            begun.set()
            for _ in range(20):
                linear_block(x, weight, outs[0])
            done.wait(60)
            graph.capture_end()
        running.result()
    assert torch.equal(bits(outs[1]), bits(expected)) and not outs[0].any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(outs[0]), bits(expected))


def layers_of(encode, rng, count: int) -> list[list]:
    """Weights of layers: fp8, and 24 plain rows, that share x; fp8; gate and up; one with as many columns as gates have rows."""
    return [
        [
            on_gpu(encode(kind, matrix("normal", shape, rng)).weight)
            for kind, shape in (
                *(("fp8", (1056, 1024)), ("half", (24, 1024)), ("fp8", (1024, 1024))),
                *(("nvfp4", (2080, 1024)), ("nvfp4", (2080, 1024)), ("nvfp4", (1024, 2080))),
            )
        ]
        for _ in range(count)
    ]


def chain(x: torch.Tensor, layers: list[list], stop=lambda: None) -> list[torch.Tensor]:
    """Products as a chunk has them, each with the last one's in its own input; `stop`: a step outside of graphs."""
    outs = []
    for first, few, output, gate, up, down in layers:
        wide = torch.empty(len(x), 1080, device="cuda")
        linear_blocks(x, [first, few], list(wide.split([1056, 24], dim=1)))
        stop()
        x = (wide[:, :1024] / 32).half()
        x = (linear_block(x, output) / 32).half()
        x = torch.tanh(linear_block(swiglu_block(x / 8, gate, up) / 4, down) / 64)  # so that nothing grows
        outs += [wide, x]
    assert torch.cuda.is_current_stream_capturing() or all(torch.isfinite(out).all() for out in outs)
    return outs


@pytest.mark.parametrize("room", [2 * 4160 * 1024, 5 * 4160 * 1024, 4160 * 1024], ids=["two", "five", "one"])
@pytest.mark.parametrize("spared", [0, 512])
def test_weights_made_ahead_give_the_bits_of_those_in_turn(encode, room, spared):
    """Pass after pass, of several lengths, on a stream that goes first, and captured with a stop in every layer."""
    rng = np.random.default_rng(11)
    layers, x = layers_of(encode, rng, 4), activations("normal", 1024, rng, 300)
    ahead, stream = PlainAhead(room, x.device), torch.cuda.Stream(priority=-1)
    with using(replace(WAYS["narrow"], sparing_up_to=spared)):
        expected = {tokens: chain(x[:tokens], layers) for tokens in (97, 200, 300)}
        if spared:  # the vendor may choose another product, so the first pass, in turn, says what is expected
            for tokens in expected:
                with PlainAhead(room, x.device).reading("chain"):
                    found = chain(x[:tokens], layers)
                for one, other in zip(found, expected[tokens], strict=True):
                    assert float((one - other).norm() / other.norm()) <= HALF_ERROR
                expected[tokens] = found
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(6):
                for tokens, wanted in expected.items():
                    with ahead.reading("chain"):
                        found = chain(x[:tokens], layers)
                    stream.synchronize()
                    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), tokens
            with ahead.reading("chain"):
                chain(x[:200], layers[2:] + layers[:2])  # another order: in turn from here on
            with ahead.reading("chain"):
                found = chain(x[:200], layers)
            stream.synchronize()
            assert all(torch.equal(one, other) for one, other in zip(found, expected[200], strict=True))
            with ahead.reading("chain"):
                chain(x[:300], layers)
            graphs: list[torch.cuda.CUDAGraph] = []

            def begin() -> None:
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(capture_error_mode="thread_local", pool=pool)

            def stop() -> None:
                plain_ahead.join()
                graphs[-1].capture_end()
                begin()

            pool = torch.cuda.graph_pool_handle()
            begin()
            with ahead.reading("chain"):
                found = chain(x, layers, stop)
            graphs[-1].capture_end()
            for _ in range(5):
                for graph in graphs:
                    graph.replay()
                with ahead.reading("chain"):
                    other = chain(x, layers)
            stream.synchronize()
    for got in (found, other):
        assert all(torch.equal(one, wanted) for one, wanted in zip(got, expected[300], strict=True))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("beside", ["ahead", "in turn", "lately"])
def test_weights_that_stay_give_the_bits_of_those_in_turn(encode, share, beside):
    """Pass after pass, of several lengths, and captured with a stop in every layer; alone, and beside some made ahead."""
    rng = np.random.default_rng(17)
    layers, x = layers_of(encode, rng, 4), activations("normal", 1024, rng, 300)
    every = 4 * 1024 * (1088 + 1024 + 2 * 2080 + 2080)
    stream, late = torch.cuda.Stream(priority=-1), 5 * 1024 * 1024 if beside == "lately" else 0
    kept = PlainKept(int(share * every), every, x.device, lately=late)
    ahead = PlainAhead(2 * 4160 * 1024, x.device) if beside == "ahead" else None

    def reading():
        return ahead.reading("chain") if ahead else nullcontext()

    with using(replace(WAYS["narrow"], sparing_up_to=0)):
        expected = {tokens: chain(x[:tokens], layers) for tokens in (97, 300)}
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), kept.serving():
            for _ in range(4):
                for tokens, wanted in expected.items():
                    with reading():
                        found = chain(x[:tokens], layers)
                    stream.synchronize()
                    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), tokens
            held = kept.used
            graphs, pool = [torch.cuda.CUDAGraph()], torch.cuda.graph_pool_handle()
            graphs[-1].capture_begin(capture_error_mode="thread_local", pool=pool)

            def stop() -> None:
                plain_ahead.join()
                graphs[-1].capture_end()
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(capture_error_mode="thread_local", pool=pool)

            with reading():
                found = chain(x, layers, stop)
            graphs[-1].capture_end()
            for _ in range(3):
                for graph in graphs:
                    graph.replay()
                with reading():
                    other = chain(x, layers)
            stream.synchronize()
    for got in (found, other):
        assert all(torch.equal(one, wanted) for one, wanted in zip(got, expected[300], strict=True))
    assert kept.used == held <= kept.room and kept.room - held <= 4160 * 1024
    stay = sum(plain is not None for plain in kept._known.values())
    assert stay == 16 if share == 1 else 0 < stay < 16


def test_two_threads_each_with_weights_made_ahead(encode):
    rng = np.random.default_rng(12)
    layers = [layers_of(encode, rng, 2) for _ in range(2)]
    inputs = [activations("normal", 1024, rng, 200 + 56 * number) for number in range(2)]
    with using(replace(WAYS["narrow"], sparing_up_to=0)):
        expected = [chain(x, own) for x, own in zip(inputs, layers, strict=True)]
    torch.cuda.synchronize()
    begin = threading.Barrier(2, timeout=60)

    def work(number: int) -> list[list[torch.Tensor]]:
        ahead, stream, found = PlainAhead(2 * 4160 * 1024, inputs[0].device), torch.cuda.Stream(priority=-1), []
        with torch.cuda.stream(stream), using(replace(WAYS["narrow"], sparing_up_to=0)):
            begin.wait()
            for _ in range(20):
                with ahead.reading("chain"):
                    found.append(chain(inputs[number], layers[number]))
            stream.synchronize()
        return found

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(copy_context().run, work, number) for number in range(2)]
        for number, run in enumerate(running):
            for got in run.result():
                assert all(torch.equal(one, other) for one, other in zip(got, expected[number], strict=True))


def test_few_tokens_stay_with_the_decode_linear(encode):
    rng = np.random.default_rng(7)
    weight, x = on_gpu(encode("fp8", matrix("normal", (512, 560), rng)).weight), activations("normal", 560, rng, 24)
    with using(WAYS["wide"]):
        assert torch.equal(bits(linear_block(x, weight)), bits(linear(x, weight, dtype=torch.float16)))
        with pytest.raises(InputError, match="not a multiple of 16"):
            linear_block(torch.zeros(30 * 560 + 1, dtype=torch.float16, device="cuda")[1:].view(30, 560), weight)
