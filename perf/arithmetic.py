"""What the engine's arithmetic costs: teacher-forced divergence between precisions, at depths of one long text.

Every path reads the same tokens with the same weights. `fp32` and `bf16` are `plain_model`'s; `fp16` and `int8` the CUDA engine
with keys and values in fp16 and in int8. Predictions are kept of the last positions before each depth, as a prompt's chunk
gives them, and of as many tokens behind the last depth, which the engine reads in decode rounds of 1 + 3 tokens.
"""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checkpoint.errors import CheckFailed, EnvironmentFault
from ..kernels.linear import MAX_TOKENS
from ..kernels.weights import Fp8BlockWeight
from ..runtime.engine.cuda.executor import CudaExecutor
from ..runtime.engine.cuda.weights import CudaAttention, CudaDelta, CudaLayer, CudaWeights
from ..runtime.engine.lane import Lane
from ..runtime.engine.pages import PAGE, pages_for
from ..runtime.messages import GenerateRequest, SamplingParams
from ..runtime.parallel.device import DeviceCollective, SoloDevice
from .divergence import Divergence
from .plain_model import PRECISIONS, PlainModel, slices
from .together import Together

ENGINE = {"fp16": False, "int8": True}  # path -> keys and values in int8
PAIRS = {"fp16-2": False, "int8-2": True}  # the same on two ranks, whose sums meet in fp16
PATHS = (*PRECISIONS, *ENGINE, *PAIRS)
ROUND = 4  # tokens: one and three drafts
DECODE = "decode"


@dataclass(frozen=True)
class Depth:
    """`positions` before `end`, whose next tokens are predicted; `decoded`: by decode rounds."""

    end: int
    positions: int
    decoded: bool = False

    @property
    def first(self) -> int:
        return self.end - self.positions

    def __str__(self) -> str:
        return f"{self.first:,}..{self.end - 1:,}" + (f" {DECODE}" if self.decoded else "")


@dataclass(frozen=True)
class Found:
    """At one depth. In nats: the first path's mean entropy, each path's mean loss of the text's next token.

    `pairs`: (reference, measured) -> divergence.
    """

    depth: Depth
    entropy: float
    loss: dict[str, float]
    pairs: dict[tuple[str, str], Divergence]


@dataclass(frozen=True)
class Study:
    """`overflows`: values that fp16 could not hold, by engine path; `seconds`: that each path took."""

    paths: tuple[str, ...]
    tokens: int
    found: list[Found]
    overflows: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class EngineReader:
    """The CUDA engine's own passes over one lane."""

    def __init__(
        self, weights: CudaWeights, tokens: list[int], int8: bool, link: DeviceCollective | None = None
    ) -> None:
        context = pages_for(len(tokens) + ROUND + 1) * PAGE
        vocabulary = weights.config.text.vocab_size
        self._executor = CudaExecutor(
            weights,
            link or SoloDevice(),
            max_context=context,
            lanes=1,
            drafts=0,
            n_sampleable=vocabulary,
            int8=int8,
            graphs=False,
        )
        request = GenerateRequest(1, tokens, ROUND + 1, [], True, SamplingParams(temperature=0.0))
        self._lane = Lane(0, request, ROUND + 1, list(range(self._executor.pages)))
        self._executor.open(self._lane)
        self._length, self._vocabulary, self._device = 0, vocabulary, weights.device

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        model, start = self._executor.model, self._length
        places = torch.arange(start, start + len(tokens), dtype=torch.int32, device=self._device)  # pages lie in order
        ids = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        staged, _ = model.read(model.embed(ids), 0, start, places.expand(3, -1).contiguous(), places.contiguous())
        self._length += len(tokens)
        return staged

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), self._vocabulary, device=self._device)
        for rows, into in zip(hidden.split(MAX_TOKENS), out.split(MAX_TOKENS), strict=True):
            self._executor.model.logits(rows.contiguous(), into)
        return out

    def decode(self, tokens: list[int]) -> Tensor:
        """Logits of tokens that rounds read, float32 [T, V]."""
        parts = []
        for begin in range(0, len(tokens), ROUND):
            few = tokens[begin : begin + ROUND]
            parts.append(self._executor.feed(self._lane, self._length, few))
            self._length += len(few)
        return torch.cat(parts)

    @property
    def overflows(self) -> int:
        return int(self._executor.state.overflows.sum())


class PairReader:
    """Both ranks of a split model in this process, on one device; what rank 0 gives, which is what both give."""

    def __init__(self, ranks: Sequence[CudaWeights], tokens: list[int], int8: bool) -> None:
        self._together = Together(ranks[0].device)
        self._readers = self._together.both(
            lambda rank: EngineReader(ranks[rank], tokens, int8, self._together.links[rank])
        )

    def read(self, tokens: list[int]) -> Tensor:
        return self._alike(lambda reader: reader.read(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._alike(lambda reader: reader.logits(hidden))

    def decode(self, tokens: list[int]) -> Tensor:
        return self._alike(lambda reader: reader.decode(tokens))

    @property
    def overflows(self) -> int:
        return sum(reader.overflows for reader in self._readers)

    def close(self) -> None:
        self._together.close()

    def _alike(self, action: Callable[[EngineReader], Tensor]) -> Tensor:
        first, second = self._together.both(lambda rank: action(self._readers[rank]))
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise CheckFailed("the two ranks have different numbers: on two cards their lockstep would stop them.")
        return first


def depths_of(context: int, positions: int) -> list[Depth]:
    """A quarter at a time down from `context`, as long as depths stand apart."""
    ends = [context]
    while ends[-1] // 4 >= 2 * positions:
        ends.append(ends[-1] // 4)
    found = [Depth(end, min(positions, end)) for end in reversed(ends)]
    return [*found, Depth(context + positions, positions, decoded=True)]


def study(
    weights: CudaWeights,
    tokens: list[int],
    depths: Sequence[Depth],
    paths: Sequence[str],
    ids: int,
    chunk: int,
    tick: Callable[[int], None],
    ranks: Sequence[CudaWeights] = (),
) -> Study:
    """`tokens`: one more than the last depth's end. `ids`: that the tokenizer can emit. `tick`: tokens done, of each path.
    `ranks`: the same weights split over two, for the paths that need them.

    Raises CheckFailed for predictions that are not finite, EnvironmentFault if the card's memory is too small.
    """
    assert len(tokens) == depths[-1].end + 1
    logits: dict[str, list[Tensor]] = {}
    overflows, seconds = {}, {}
    for path in paths:
        begun = time.perf_counter()
        try:
            reader: EngineReader | PairReader | PlainModel
            if path in ENGINE:
                reader = EngineReader(weights, tokens, ENGINE[path])
            elif path in PAIRS:
                reader = PairReader(ranks, tokens, PAIRS[path])
            else:
                spare = torch.cuda.mem_get_info(weights.device)[0] // 3 if weights.device.type == "cuda" else 0
                reader = PlainModel(weights, PRECISIONS[path], len(tokens), spare)
            logits[path] = _walk(reader, tokens, depths, ids, chunk, tick)
        except torch.cuda.OutOfMemoryError as error:
            raise EnvironmentFault(
                f"{path} at {len(tokens):,} positions: the card has no room: {str(error).splitlines()[0]} A smaller "
                "--context or --chunk needs less, or fewer --paths."
            ) from None
        if not isinstance(reader, PlainModel):
            overflows[path] = reader.overflows
        if isinstance(reader, PairReader):
            reader.close()
        seconds[path] = round(time.perf_counter() - begun, 2)
        del reader
        gc.collect()
        if weights.device.type == "cuda":
            torch.cuda.empty_cache()
    found = []
    for number, depth in enumerate(depths):
        after = tokens[depth.first + 1 : depth.end + 1]
        found.append(judged(depth, {path: rows[number] for path, rows in logits.items()}, after, weights.device))
    return Study(tuple(paths), len(tokens), found, overflows, seconds)


def _walk(
    reader: EngineReader | PairReader | PlainModel,
    tokens: list[int],
    depths: Sequence[Depth],
    ids: int,
    chunk: int,
    tick: Callable[[int], None],
) -> list[Tensor]:
    """Logits [positions, ids] on the CPU, of each depth."""
    parts: list[list[Tensor]] = [[] for _ in depths]
    prompt = max(depth.end for depth in depths if not depth.decoded)
    for start in range(0, prompt, chunk):
        stop = min(prompt, start + chunk)
        hidden = reader.read(tokens[start:stop])
        for number, depth in enumerate(depths):
            first, last = max(start, depth.first), min(stop, depth.end)
            if first < last and not depth.decoded:
                parts[number].append(reader.logits(hidden[first - start : last - start])[:, :ids].cpu())
        tick(stop - start)
    for number, depth in enumerate(depths):
        if depth.decoded:
            own = tokens[depth.first : depth.end]
            rows = reader.logits(reader.read(own)) if isinstance(reader, PlainModel) else reader.decode(own)
            parts[number].append(rows[:, :ids].cpu())
            tick(depth.positions)
    return [torch.cat(own) for own in parts]


def judged(depth: Depth, logits: dict[str, Tensor], after: list[int], device: torch.device) -> Found:
    """The figures of one depth, of logits float32 [positions, ids] by path; `after`: the tokens that came next."""
    scores = {}
    for path, rows in logits.items():
        if not bool(torch.isfinite(rows).all()):
            raise CheckFailed(f"{path}: predictions at {depth} are not finite.")
        scores[path] = torch.log_softmax(rows.to(device).double(), dim=-1)
    first = next(iter(scores))
    next_ids = torch.tensor(after, device=device)[:, None]
    pairs = [(first, path) for path in scores if path != first]
    pairs += [pair for pair in itertools.pairwise(scores) if pair not in pairs]
    return Found(
        depth,
        float(-(scores[first].exp() * scores[first]).sum(-1).mean()),
        {path: float(-rows.gather(1, next_ids).mean()) for path, rows in scores.items()},
        {(a, b): _divergence(scores[a], scores[b]) for a, b in pairs},
    )


def _divergence(p: Tensor, q: Tensor) -> Divergence:
    """KL of q from p; log-probabilities float64 [T, ids]."""
    nats = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return Divergence(float(nats.mean()), float(nats.max()), float(same), len(nats))


def sharpened(weights: CudaWeights, head: float = 4.0, query: float = 3.0) -> CudaWeights:
    """Random weights that predict and attend about as sharply as trained ones.

    Logits get a standard deviation of about `head`, attention's scores of about `query` (an entropy of a few nats each), and
    heads of the delta rule forget within 1 to about 2,000 tokens instead of at once.
    """
    _, part = next(slices(weights.head))
    rows = part.values() * (part.scale if part.scale.numel() == 1 else part.scale[:, None])
    spread = float(rows.square().mean().sqrt()) * rows.shape[1] ** 0.5  # of logits, as hidden states have an rms of 1

    def layer(own: CudaLayer) -> CudaLayer:
        mixer = own.mixer
        if isinstance(mixer, CudaAttention):
            sharp = torch.full_like(mixer.query_norm, query - 1.0)
            return replace(own, mixer=replace(mixer, query_norm=sharp))
        assert isinstance(mixer, CudaDelta)
        slow = torch.linspace(-7.0, 1.0, mixer.delta.value_heads, device=mixer.norm.device)
        return replace(own, mixer=replace(mixer, delta=replace(mixer.delta, a_log=slow)))

    assert not isinstance(weights.head, Fp8BlockWeight), "random weights have a scale a row"
    sharp = replace(weights.head, scale=weights.head.scale * (head / spread))
    return replace(weights, layers=[layer(own) for own in weights.layers], head=sharp)
