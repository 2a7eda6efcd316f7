"""The gated delta rule for decoding, emulated and on a GPU, against float64 and against itself."""

import ctypes

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import checks, delta, oracle
from duovolt.kernels.delta import (
    HEAD,
    DeltaState,
    DeltaWeights,
    Progress,
    Round,
    delta_decode,
    delta_decode_reference,
    delta_prefill,
    delta_prefill_reference,
)

from .conftest import ON_GPU, place
from .support import WIDE_ERROR, Guarded, bits, data, relative


class Layer:
    """A layer's weights, and the projection's rows of `tokens` tokens."""

    def __init__(self, device, key_heads=2, value_heads=4, tokens=12, kind="normal", seed=0):
        rng = np.random.default_rng(seed)
        channels = (2 * key_heads + value_heads) * HEAD
        a_log = torch.from_numpy(np.log(rng.uniform(0.5, 16, value_heads)).astype(np.float32)).to(device)
        self.weights = DeltaWeights(
            data("normal", (channels, 4), rng, device) * 0.5, a_log, data("normal", (value_heads,), rng, device) - 3
        )
        width = channels + value_heads * HEAD + -(-2 * value_heads // 4) * 4  # rows start at multiples of 16 bytes
        self.projection = data(kind, (tokens, width), rng, device)
        self.state = data("normal", (1, value_heads, HEAD, HEAD), rng, device)
        self.history = data("normal", (3, channels), rng, device)

    def parts(self, rows):
        w = self.weights
        split = [w.channels, w.value_heads * HEAD, w.value_heads, w.value_heads]
        mixed, _, b, a, *_ = self.projection[rows].split([*split, self.projection.shape[1] - sum(split)], dim=1)
        return mixed, a, b

    def memory(self, lanes=1, lane=0):
        memory = DeltaState.empty(lanes, self.weights)
        memory.state[lane] = self.state[0]
        memory.rows[0, lane, :3, : self.weights.channels] = self.history
        return memory, Progress.empty(lanes, memory.state.device)

    def exact(self, rows):
        mixed, a, b = (x.cpu().numpy() for x in self.parts(rows))
        w = self.weights
        convolved = oracle.causal_conv(mixed, self.history.cpu().numpy(), w.conv.cpu().numpy()).reshape(
            len(mixed), -1, HEAD
        )
        query, key, value = np.split(convolved, [w.key_heads, 2 * w.key_heads], axis=1)
        query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
        gates = oracle.delta_gates(a, b, w.a_log.cpu().numpy(), w.dt_bias.cpu().numpy())
        return oracle.delta_rule(query, key, value, *gates, self.state[0].cpu().numpy())


def step(layer, memory, rows, lane=0, accepted=0):
    """A round, and then `accepted` of its tokens stand."""
    mixed, a, b = layer.parts(rows)
    got = delta_decode(mixed, a, b, layer.weights, *memory, Round.of([lane], [len(mixed)], mixed.device))
    memory[1].advance(lane, accepted)
    return got


@pytest.mark.parametrize("kind", ["normal", "heavy", "zero"])
@pytest.mark.parametrize("heads", [(2, 4), (1, 3)], ids=str)
def test_a_round_against_float64(device, heads, kind):
    layer = Layer(device, *heads, tokens=8, kind=kind)
    memory, progress = layer.memory()
    out = Guarded((8, heads[1], HEAD), torch.float32, device)
    before = memory.state.clone()
    mixed, a, b = layer.parts(slice(0, 8))
    got = delta_decode(mixed, a, b, layer.weights, memory, progress, Round.of([0], [8], device), out.inner)
    assert got is out.inner and out.intact
    outputs, states = layer.exact(slice(0, 8))
    assert relative(got, outputs) <= WIDE_ERROR
    assert torch.equal(memory.state, before), "tokens that nobody has accepted must not move the state"
    progress.advance(0, 8)
    step(layer, (memory, progress), slice(7, 8))
    assert relative(memory.state[0], states[7]) <= WIDE_ERROR


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_a_round_that_was_cut_back_leaves_no_trace(overlapping_device, accepted):
    """Four tokens of which some stand, then more, gives the bits of the plain way, one token at a time."""
    device = overlapping_device
    layer = Layer(device)
    plain = layer.memory()
    plain_out = torch.cat([step(layer, plain, slice(token, token + 1), accepted=1) for token in range(10)])

    memory = layer.memory()
    first = step(layer, memory, slice(0, 4), accepted=accepted)
    assert torch.equal(bits(first), bits(plain_out[:4]))
    right = layer.projection
    layer.projection = right.clone()  # the end of the next round: drafts that will be refused
    layer.projection[accepted + 2 : accepted + 6] = Layer(device, seed=9).projection[:4]
    second = step(layer, memory, slice(accepted, accepted + 6), accepted=2)
    layer.projection = right
    assert torch.equal(bits(second[:2]), bits(plain_out[accepted : accepted + 2]))
    third = step(layer, memory, slice(accepted + 2, accepted + 5), accepted=1)
    assert torch.equal(bits(third), bits(plain_out[accepted + 2 : accepted + 5]))

    alone = layer.memory()
    for token in range(accepted + 3):
        step(layer, alone, slice(token, token + 1), accepted=1)
    assert torch.equal(bits(memory[0].state), bits(alone[0].state))
    assert torch.equal(bits(memory[0].history(0, memory[1])), bits(alone[0].history(0, alone[1])))


def test_lanes_do_not_see_one_another(overlapping_device):
    """Three sequences in one launch, one place unused, lanes out of order: each as if alone, in its second round."""
    device = overlapping_device
    layers = [Layer(device, seed=seed) for seed in (0, 1, 2)]
    for layer in layers[1:]:
        layer.weights = layers[0].weights
    memory, progress = DeltaState.empty(5, layers[0].weights), Progress.empty(5, device)
    lanes, counts = [3, 0, 4], [2, 5, 1]
    alone = []
    for lane, count, layer in zip(lanes, counts, layers, strict=True):
        own = layer.memory(5, lane)
        step(layer, own, slice(8, 11), lane, accepted=2)
        memory.state[lane], memory.rows[:, lane] = own[0].state[lane], own[0].rows[:, lane]
        progress.accepted[lane], progress.turn[lane] = own[1].accepted[lane], own[1].turn[lane]
        alone.append((step(layer, own, slice(0, count), lane), own[0], lane))
    untouched = memory.state[[1, 2]].clone()
    layers[0].projection = torch.cat([layer.projection[:n] for n, layer in zip(counts, layers, strict=True)])
    mixed, a, b = layers[0].parts(slice(None))
    batch = Round.of([3, -1, 0, 4], [2, 0, 5, 1], device)
    got = delta_decode(mixed, a, b, layers[0].weights, memory, progress, batch)
    row = 0
    for outputs, own, lane in alone:
        assert torch.equal(bits(got[row : row + len(outputs)]), bits(outputs))
        assert torch.equal(bits(memory.rows[:, lane]), bits(own.rows[:, lane]))
        assert torch.equal(bits(memory.state[lane]), bits(own.state[lane]))
        row += len(outputs)
    assert torch.equal(memory.state[[1, 2]], untouched)


def test_a_count_of_zero_moves_a_lane_to_its_last_accepted_token(overlapping_device):
    device = overlapping_device
    layer = Layer(device)
    memory, other = layer.memory(), layer.memory()
    step(layer, memory, slice(0, 4), accepted=3)
    step(layer, other, slice(0, 4), accepted=3)
    step(layer, other, slice(3, 4))
    mixed, a, b = layer.parts(slice(0, 1))
    delta_decode(mixed, a, b, layer.weights, *memory, Round.of([0], [0], device))
    memory[1].advance(0, 0)
    assert torch.equal(bits(memory[0].state), bits(other[0].state))
    assert torch.equal(memory[0].history(0, memory[1]), layer.parts(slice(0, 3))[0])


def test_the_reference_does_the_same(overlapping_device):
    device = overlapping_device
    layer = Layer(device)
    ours, theirs = layer.memory(), layer.memory()
    for rows, accepted in ((slice(0, 4), 2), (slice(2, 5), 3), (slice(5, 6), 1)):
        got = step(layer, ours, rows, accepted=accepted)
        batch = Round.of([0], [len(got)], device)
        wanted = delta_decode_reference(*layer.parts(rows), layer.weights, *theirs, batch)
        theirs[1].advance(0, accepted)
        assert relative(got, wanted.double().cpu().numpy()) <= WIDE_ERROR
    assert relative(ours[0].state, theirs[0].state.double().cpu().numpy()) <= WIDE_ERROR
    assert torch.equal(ours[0].rows, theirs[0].rows)


@pytest.mark.parametrize("kind", ["hopper", *ON_GPU[1:]])
def test_both_forms_give_the_same_bits(kind, emulated, monkeypatch):
    """Lanes that stand elsewhere than the sequences, nothing accepted, all of eight, none to pass."""
    found = []
    for apart in (True, False):
        with monkeypatch.context() as patched:
            device = next(place(kind, emulated, patched))
            if not apart:
                module = checks.module_on(delta.SOURCE, device)
                patched.setattr(delta, "_decoder", lambda device, module=module: (module, "delta_decode", 128, False))
            layer = Layer(device, 1, 3, tokens=24)
            memory, progress = DeltaState.empty(3, layer.weights), Progress.empty(3, device)
            memory.state[:] = layer.state
            outs = []
            for counts, accepted in (([1, 8, 5], [1, 8, 0]), ([3, 8, 0], [2, 5, 0]), ([4, 1, 2], [4, 1, 1])):
                mixed, a, b = layer.parts(slice(0, sum(counts)))
                out = torch.zeros(sum(counts), 3, HEAD, device=device)
                batch = Round.of([1, 0, 2], counts, device)
                outs.append(delta_decode(mixed, a, b, layer.weights, memory, progress, batch, out))
                for lane, count in zip((1, 0, 2), accepted, strict=True):
                    progress.advance(lane, count)
            found.append((*outs, memory.state, memory.rows))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_kept_rows_are_asked_for_before_it_is_known_which(emulated, monkeypatch):
    """Of both halves, what a block reads of them: hints, which the emulator holds to what is allocated."""
    device = next(place("hopper", emulated, monkeypatch))
    layer = Layer(device, 1, 3)
    memory, progress = layer.memory(lanes=2)
    step(layer, (memory, progress), slice(0, 4))
    library, found = emulated(delta.APART_SOURCE, "hopper")._library, (ctypes.c_uint64 * 16384)()
    sectors = {address // 32 for address in found[: library.prefetched(found, len(found))]}
    channels, width = layer.weights.channels, memory.rows.shape[-1]
    for half in memory.rows[:, 0]:
        first = half.data_ptr() // 32
        read = {first + (row * width + channel) // 8 for row in range(8) for channel in range(channels + 6)}
        assert read <= sectors
    assert {address // 32 for address in (memory.rows[0, 1].data_ptr(), memory.rows[1, 1].data_ptr())}.isdisjoint(
        sectors
    )


@pytest.mark.parametrize("cuts", [(70,), (1, 2, 67), (64, 6), (16, 17, 37)], ids=str)
def test_prefill_has_the_bits_of_decoding_one_by_one(device, cuts):
    layer = Layer(device, 1, 2, tokens=74)
    plain, memory = layer.memory(2, 1), layer.memory(2, 1)
    wanted = torch.cat([step(layer, plain, slice(t, t + 1), 1, accepted=1) for t in range(74)])
    got, first = [], 0
    for count in cuts:
        mixed, a, b = layer.parts(slice(first, first + count))
        out = Guarded((count, 2, HEAD), torch.float32, device)
        assert delta_prefill(mixed, a, b, layer.weights, *memory, 1, out.inner) is out.inner and out.intact
        got.append(out.inner)
        first += count
    then = step(layer, memory, slice(70, 74), 1)
    assert torch.equal(bits(torch.cat([*got, then])), bits(wanted))
    outputs, _ = layer.exact(slice(0, 74))
    assert relative(wanted, outputs) <= WIDE_ERROR


def test_chunks_of_the_reference_end_in_the_same_state(device):
    layer = Layer(device, 1, 2, tokens=74)
    ours, theirs = layer.memory(), layer.memory()
    for rows in (slice(0, 2), slice(2, 74)):
        got = delta_prefill(*layer.parts(rows), layer.weights, *ours, 0)
        wanted = delta_prefill_reference(*layer.parts(rows), layer.weights, *theirs, 0)
        assert relative(got, wanted.double().cpu().numpy()) <= WIDE_ERROR
    assert relative(ours[0].state, theirs[0].state.double().cpu().numpy()) <= WIDE_ERROR
    assert torch.equal(ours[0].history(0, ours[1]), theirs[0].history(0, theirs[1]))


def test_bad_calls_are_refused():
    layer = Layer(torch.device("cpu"))
    memory, batch = layer.memory(), Round.of([0], [2], torch.device("cpu"))
    mixed, a, b = layer.parts(slice(0, 2))
    for call, message in (
        (lambda: delta_decode(mixed[:, :-128], a, b, layer.weights, *memory, batch), r"mixed is \[2, 896\]"),
        (lambda: delta_decode(mixed, a.contiguous(), b, layer.weights, *memory, batch), "parts of one projection"),
        (lambda: delta_decode(mixed, a, b.half(), layer.weights, *memory, batch), "b is torch.float16"),
        (lambda: DeltaWeights(layer.weights.conv[:900], layer.weights.a_log, layer.weights.dt_bias), "conv is"),
        (lambda: DeltaWeights(layer.weights.conv, layer.weights.a_log, torch.zeros(3)), r"dt_bias is \[3\]"),
        (lambda: delta_prefill(mixed, a, b, layer.weights, *memory, 1), "lane is 1: expected 0 to 0"),
        (lambda: delta_decode(mixed, a, b, layer.weights, *memory, batch), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()
