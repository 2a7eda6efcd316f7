"""The executor of the CUDA backend: rounds in captured graphs, one of them always ahead of the host.

On a CPU the same code runs on the operations' torch references, without graphs.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....checkpoint.errors import InputError
from ....kernels.delta import Round as DeltaRound
from ....kernels.linear import MAX_TOKENS
from ....kernels.ops import Ops, ops_for
from ....kernels.prefill_attention import torch_attends
from ....kernels.round_state import STOPS
from ....kernels.tuning import choice_on
from ...messages import TokenLogprob
from ...parallel.device import DeviceCollective
from ..admission import check_range, check_settings
from ..executor import Outcome
from ..lane import Lane
from ..pages import PAGE, pages_for
from ..speculation import MAX_DRAFTS
from ..vision import PromptImages, VisionTower, rows_hash
from .flights import Flight, Flights
from .graphs import Graphs
from .model import CudaModel
from .state import CudaState, SavedState
from .weights import CudaWeights

PAGES_FILLED = 64  # at a time, in eight bytes a number: 34 MB for four heads


class CudaExecutor:
    """Computes for `lanes` lanes at a time.

    drafts        MTP drafts a round, 0 .. 5
    n_sampleable  ids 0 .. n_sampleable - 1 may be drawn; later rows of the head are padding
    pages         pages of the pools; None: enough for every lane at full context
    int8          keys and values in int8, else in fp16
    draft_window  tokens of context that drafting looks at, in whole pages; 0: all
    draft_head    draw drafts with the reduced head, where there is one
    head_split    of a head that is cut over the ranks gather candidates, where they are enough, in place of whole logits
    attention     `split` over positions and on tensor cores, or `plain`, for rounds and prompts
    chunked_delta prompts go through the delta rule 64 tokens at a time, on tensor cores; else one by one
    graphs        capture rounds; overlap: their launches may begin before the one before has ended, where the card can
    ahead         start a round before the last one's numbers are read
    keep          bytes of plain weights that stay for prompts
    tower         reads pictures
    """

    def __init__(
        self,
        weights: CudaWeights,
        link: DeviceCollective,
        *,
        max_context: int,
        lanes: int,
        drafts: int,
        n_sampleable: int,
        pages: int | None = None,
        int8: bool = True,
        draft_head: bool = True,
        draft_window: int = 0,
        head_split: bool = False,
        attention: str = "split",
        graphs: bool = True,
        overlap: bool = True,
        chunked_delta: bool = True,
        ahead: bool = True,
        keep: int = 0,
        tower: VisionTower | None = None,
        ops: Ops | None = None,
    ) -> None:
        check_settings(max_context, lanes)
        check_range("drafts", drafts, 0, MAX_DRAFTS)
        check_range("ids that may be drawn", n_sampleable, 1, weights.config.text.vocab_size)
        if drafts and weights.mtp is None:
            raise InputError(f"{drafts} drafts a round asked for, but the model has no MTP layer. Use 0 drafts.")
        self.pages = lanes * pages_for(max_context) if pages is None else pages
        self.state = CudaState(
            weights, lanes=lanes, pages=self.pages, context=max_context, int8=int8, vocabulary=n_sampleable
        )
        ops = ops or ops_for(weights.device)
        ops = replace(ops, delta_prefill=partial(ops.delta_prefill, chunked=chunked_delta))
        if attention == "plain":
            ops = replace(ops, decode_attention=ops.plain_attention, prefill_attention=ops.plain_prefill_attention)
        self.model = CudaModel(
            *(weights, self.state, link, ops),
            positions=max_context,
            draft_head=draft_head,
            head_split=head_split,
            keep=keep,
        )
        self.overflows = 0
        self._context, self._int8, self._lanes, self._attention = max_context, int8, lanes, attention
        self._delta = "chunked" if chunked_delta else "recurrent"
        self._device, self._link, self._vocabulary = weights.device, link, n_sampleable
        self._uses_mtp, self._ahead = drafts > 0, ahead
        self._graphs = Graphs(weights.device, enabled=graphs and link.name != "cpu", overlap=overlap)
        window = pages_for(draft_window)
        self._flights = Flights(
            *(self.model, self._graphs), lanes=lanes, drafts=drafts, vocabulary=n_sampleable, window=window
        )
        self._pending: Flight | None = None
        self._read_until: torch.cuda.Event | None = None  # the chunk that was started last
        self._lengths: dict[int, int] = {}  # tokens in place by lane, as of the rounds that were handed out
        self._images: dict[int, PromptImages] = {}
        self._tower = tower
        self._seen = b""

    @property
    def state_bytes(self) -> int:
        return self.state.state_bytes

    @property
    def facts(self) -> dict[str, str]:
        rows = self.model.draft_rows
        graphs = "off" if not self._graphs.enabled else "on" if self._graphs.overlap else "serial"
        if self._graphs.fault is not None:
            graphs = f"off ({self._graphs.fault})"
        return {
            "kv": "int8" if self._int8 else "fp16",
            "kv_pages": str(self.pages),
            "attention": self._attention,
            "head_split": self.model.head_split,
            "draft_head": f"{rows}-rows" if rows else "full",
            "draft_window": f"{window * PAGE}" if (window := self._flights.window) else "off",
            "graphs": graphs,
            "delta": self._delta,
            "prompts": choice_on(self._device).prompts + self.model.prompts.told,
            "plain_weights": self.model.prompts.kept,
            "collective": self._link.name,
        }

    @torch.inference_mode()
    def warm(self, chunk: int = 512) -> None:
        """Load what rounds and chunks of `chunk` tokens need, and capture what most answers use, before anybody waits.

        Other numbers of lanes and depths are captured when they first come. Every rank calls it, before any lane opens.
        """
        for sequences in range(1, self._lanes + 1):
            self._flights.warm(self._flights.shapes(sequences, every_depth=sequences == 1))
        count = min(chunk, self._context)
        self.capture_chunks(chunk)
        self._read_nothing(0, 0, count)
        if self._device.type == "cuda" and torch_attends(torch.cuda.get_device_capability(self._device)):
            # torch has other kernels for what comes later
            self._read_nothing(0, count, min(count, self._context - count))
        if self._graphs.wanted and self.model.is_captured(chunk):  # not: if this rank could; all meet in every pass
            for lane in range(self._lanes):
                self._read_nothing(lane, 0, count)
        self._link.check()

    def capture_chunks(self, tokens: int) -> None:
        """From now on capture prompts' chunks of so many tokens."""
        self.model.capture_chunks(tokens, self._graphs)

    def _read_nothing(self, lane: int, start: int, count: int) -> None:
        """A prompt's chunk in a lane, of any length, that leaves no keys and values, and no state."""
        if count < 1:
            return
        self.state.lanes.tables[lane] = 0
        with self.model.prompts.stream():
            places = torch.arange(start, start + count, dtype=torch.int32, device=self._device)
            rope, slots = places.repeat(3, 1), torch.full_like(places, -1)
            x = self.model.embed(torch.zeros_like(places))
            embedded = x.clone()
            _, wide = self.model.read(x, lane, start, rope, slots)
            if self._uses_mtp:
                self.model.draft(embedded, wide, self.model.chunk(lane, start, rope, slots))
        self.state.reset(lane)

    def open(self, lane: Lane) -> None:
        request, lanes, index = lane.request, self.state.lanes, lane.index
        self.state.reset(index)
        self.state.set_table(index, lane.pages)
        lanes.prompts[index] = len(request.prompt)
        lanes.shifts[index] = lane.rope_delta
        lanes.edges[:, index] = self._int32(lane.rope(len(request.prompt) - 1, 1))[:, 0]
        stops = [] if request.ignore_eos else request.stop_ids[:STOPS]
        lanes.stops[index] = self._int32(torch.tensor([*stops, *[-1] * (STOPS - len(stops))]))
        wishes = request.sampling
        self.state.sampling.start(
            *(index, request.prompt),
            temperature=wishes.temperature,
            top_k=wishes.top_k,
            top_p=wishes.top_p,
            min_p=wishes.min_p,
            repetition=wishes.repetition_penalty,
            presence=wishes.presence_penalty,
            frequency=wishes.frequency_penalty,
            bias=wishes.logit_bias,
            seed=wishes.seed,
        )
        self._lengths[index] = 0
        self._images[index] = PromptImages(request.images, self._tower)

    def grow(self, lane: Lane) -> None:
        self.state.set_table(lane.index, lane.pages)

    def close(self, lane: Lane) -> None:
        self.state.lanes.limits[lane.index] = 0
        del self._images[lane.index], self._lengths[lane.index]

    def look(self, lane: Lane, start: int, count: int) -> bool:
        with self.model.prompts.stream():
            done = self._images[lane.index].look(start, count)
        if not done:
            self._await_last_chunk()
        return done

    def prefill(self, lane: Lane, start: int, count: int) -> list[TokenLogprob]:
        with self.model.prompts.stream():
            scores = self._read(lane, start, count)
        self._await_last_chunk()
        self._link.check()
        return scores

    def _read(self, lane: Lane, start: int, count: int) -> list[TokenLogprob]:
        """A prompt's chunk: what is to be told of it."""
        assert self._lengths[lane.index] == start, "a prompt is read in order"
        prompt, index, state = lane.request.prompt, lane.index, self.state
        images = self._images[index].rows(start, count)
        self._seen += rows_hash([(begin, rows.float().cpu()) for begin, rows in images])
        x = self.model.embed(self._int32(torch.tensor(prompt[start : start + count])))
        for begin, rows in images:
            x[begin : begin + len(rows)] = rows.to(self._device)
        before = 1 if self._reads_drafts(lane) and start else 0  # the MTP layer lags by a token
        slots = self._int32(self._slots(lane, start - before, count + before))
        rope = self._int32(lane.rope(start - before, count + before))
        embedded = x.clone() if self._reads_drafts(lane) else x
        staged, wide = self.model.read(x, index, start, rope[:, before:], slots[before:])
        behind = count - 1 + before
        if self._reads_drafts(lane) and behind:
            kept = torch.cat((state.hidden[index, :before], wide[: count - 1]))
            self._read_drafts(lane, start - before, embedded[1 - before :], kept, rope[:, :behind], slots[:behind])
        state.hidden[index, 0] = wide[-1]
        self._images[index].release(start + count)
        self._lengths[index] = start + count
        return self._echoed(lane, staged, prompt[start + 1 : start + 1 + count])

    def _await_last_chunk(self) -> None:
        """Let the host be one chunk ahead of the card and no more: a long prompt whose chunks all stood in the card's queue
        could be neither cancelled nor followed by another lane's round."""
        if self._device.type != "cuda":
            return
        last, self._read_until = self._read_until, torch.cuda.Event(blocking=True)
        self._read_until.record()
        if last is not None:
            last.synchronize()

    def first(self, lane: Lane) -> Outcome:
        lanes, index, length = self.state.lanes, lane.index, len(lane.request.prompt)
        lanes.lengths[index] = length - 1  # as if a round had read the prompt's last token
        lanes.kept[index] = 1
        lanes.limits[index] = length + lane.limit
        flight = self._flights.first(lane)
        return self._outcome(lane, flight)

    def round(self, lanes: list[Lane]) -> list[Outcome]:
        flight, self._pending = self._pending, None
        missing = [lane for lane in lanes if flight is None or not flight.carries(lane)]
        late = self._flights.start(missing) if missing else None
        goes_on = any(lane.remaining > 1 for lane in lanes)  # else this round is the last of all
        if self._ahead and goes_on and all(self._foreseen(lane) for lane in lanes):
            self._pending = self._flights.start(lanes, ahead=1)
        outcomes = []
        for lane in lanes:
            source = flight if flight is not None and flight.carries(lane) else late
            assert source is not None
            outcomes.append(self._outcome(lane, source))
        return outcomes

    def save(self, lane: Lane) -> SavedState | None:
        """None, too, behind a stop id that the device does not know of (it knows eight), or with a round ahead."""
        index, state = lane.index, self.state
        running = self._pending is not None and self._pending.carries(lane)
        rested = int(state.lanes.limits[index] - state.lanes.lengths[index]) <= 1
        if self._lengths[index] != lane.length or (running and not rested):
            return None
        self._settle(index)
        return state.saved(index, lane.length, int(state.lanes.kept[index]))

    def load(self, lane: Lane, saved: object) -> None:
        assert isinstance(saved, SavedState)
        self.state.load(lane.index, saved)
        behind = len(saved.hidden) - 1
        if self._reads_drafts(lane) and behind:  # the MTP layer catches up with what it had not read
            start = saved.length - behind - 1
            x = self.model.embed(self._int32(torch.tensor(lane.request.prompt[start + 1 : saved.length])))
            slots, rope = self._int32(self._slots(lane, start, behind)), self._int32(lane.rope(start, behind))
            hidden = saved.hidden[:-1].to(self._device, non_blocking=True)
            self._read_drafts(lane, start, x, hidden, rope, slots)
        self._images[lane.index].release(saved.length)
        self._lengths[lane.index] = saved.length

    def copy_page(self, source: int, target: int) -> None:
        self.state.copy_page(source, target)

    def seen(self) -> bytes:
        seen, self._seen = self._seen, b""
        return seen

    def fill(self, lane: Lane, length: int, token: int, seed: int = 0) -> None:
        """For measuring: as if `length` tokens had been read and `token` came next. Keys and values are random.

        They are drawn for a few pages at a time: what is measured beside them is the memory of a server.
        """
        generator = torch.Generator(self._device).manual_seed(seed)
        state, index = self.state, lane.index
        pages = torch.tensor(lane.pages[: pages_for(length)], device=self._device)
        for pool in state.pools:
            for part, scales in ((pool.keys, pool.key_scales), (pool.values, pool.value_scales)):
                for some in pages.split(PAGES_FILLED):
                    shape = (len(some), *part.shape[1:])
                    if scales is None:
                        part[some] = torch.randn(shape, generator=generator, device=self._device).to(part.dtype)
                        continue
                    part[some] = torch.randint(1, 256, shape, generator=generator, device=self._device).to(part.dtype)
                    scales[some] = 1 / 64
        state.lanes.lengths[index] = length
        state.lanes.prompts[index] = 0
        state.lanes.limits[index] = len(lane.request.prompt) + lane.limit
        state.lanes.kept[index] = 1
        state.lanes.next[index, 0] = token
        self._lengths[index] = length

    def in_turn(self) -> AbstractContextManager[None]:
        """For measuring: within it, launches of captured rounds do not overlap."""
        return self._graphs.in_turn()

    def force(self, lane: Lane, accepted: int) -> None:
        """For measuring: so many drafts of every round stand, whatever the logits say; -1: as they say."""
        self.state.forced[lane.index] = accepted

    @torch.inference_mode()
    def feed(self, lane: Lane, length: int, tokens: list[int]) -> Tensor:
        """For measuring: a round that reads exactly `tokens`, 1 to 6, behind `length` others: logits float32 [T, V]."""
        lanes, index = self.state.lanes, lane.index
        lanes.lengths[index], lanes.prompts[index], lanes.kept[index] = length, 0, 1
        lanes.limits[index] = len(lane.request.prompt) + lane.limit
        lanes.next[index, 0] = tokens[0]
        lane.read, lane.rounds, lane.forced = length, 0, [tokens[1:]]
        self.force(lane, len(tokens) - 1)
        flight = self._flights.start([lane], whole=True)
        flight.land()
        self._link.check()
        self._count(flight.overflows)
        self._lengths[index] = length + len(tokens)
        return self._flights.canvas.logits[: len(tokens)].clone()

    def _outcome(self, lane: Lane, flight: Flight) -> Outcome:
        flight.land()
        self._link.check()
        self._count(flight.overflows)
        reading = flight.reading(lane)
        if not reading.tokens:
            return Outcome([], fault=f"the model's logits after token {len(lane.tokens) - 1} are not finite.")
        number = flight.number(lane)
        tokens, _ = lane.cut(reading.tokens)
        if flight.masks is not None and (fault := flight.masks.fault(number, len(reading.tokens))):
            return Outcome([], fault=fault)
        self._lengths[lane.index] = len(lane.tokens) - 1 + len(self._known_end(lane, reading.tokens))
        entries: list[TokenLogprob] = []
        if lane.request.sampling.logprobs:
            first = number * flight.shape.rows
            logits = self._flights.canvas.logits[first : first + len(tokens)]
            entries = self._scores(lane, logits, tokens)
        return Outcome(tokens, reading.judged, len(reading.tokens) - 1, entries)

    def _count(self, overflows: int) -> None:
        """Take over the card's count, of 32 bits, of values that fp16 could not hold; say so when it begins and when it is large.

        A round may be looked at behind a later one: what it has counted is known by then.
        """
        more = (overflows - self.overflows + (1 << 31)) % (1 << 32) - (1 << 31)
        total = self.overflows + max(0, more)
        for bound in (1, 1_000_000):
            if self.overflows < bound <= total:
                print(
                    f"duovolt rank: {total} values so far did not fit fp16 and were cut to 65504; answers may suffer.",
                    file=sys.stderr,
                    flush=True,
                )
        self.overflows = total

    def _known_end(self, lane: Lane, tokens: list[int]) -> list[int]:
        """What the device has taken: up to a stop id that it knows."""
        stops = [] if lane.request.ignore_eos else lane.request.stop_ids[:STOPS]
        return next((tokens[: n + 1] for n, token in enumerate(tokens) if token in stops), tokens)

    def _foreseen(self, lane: Lane) -> bool:
        """Whether a lane's next round needs nothing of the host."""
        return lane.constraint is None and lane.forced is None and not lane.request.sampling.logprobs

    def _read_drafts(self, lane: Lane, start: int, x: Tensor, hidden: Tensor, rope: Tensor, slots: Tensor) -> None:
        """Let the MTP layer read hidden states of tokens from `start` on, with the embeddings of those behind them."""
        chunk = self.model.chunk(lane.index, start, rope.contiguous(), slots.contiguous())
        self.model.draft(x.contiguous(), hidden.contiguous(), chunk)
        self.state.counter.add_(chunk.overflows.sum())

    def _reads_drafts(self, lane: Lane) -> bool:
        return self._uses_mtp and lane.forced is None

    def _settle(self, index: int) -> None:
        """Move a lane's states to its last accepted token, so that nothing is left to replay."""
        state, weights = self.state, self.model.weights
        if int(state.progress.accepted[index]) == 0:
            return
        batch = DeltaRound.of([index], [0], self._device)
        for layer in weights.layers:
            delta = getattr(layer.mixer, "delta", None)
            if delta is None:
                continue
            channels, heads = delta.channels, delta.value_heads
            empty = torch.zeros(1, channels + 2 * heads, device=self._device)
            parts = empty.split([channels, heads, heads], dim=1)
            self.model.ops.delta_decode(*parts, delta, state.delta[layer.index], state.progress, batch)
        state.progress.advance(index, 0)

    def _echoed(self, lane: Lane, staged: Tensor, after: list[int]) -> list[TokenLogprob]:
        if not lane.request.echo_logprobs:
            return []
        scores: list[TokenLogprob] = []
        for begin in range(0, len(after), MAX_TOKENS):
            few = after[begin : begin + MAX_TOKENS]
            logits = torch.empty(len(few), self.model.vocabulary, device=self._device)
            scores += self._scores(lane, self.model.logits(staged[begin : begin + len(few)], logits), few)
        return scores

    def _scores(self, lane: Lane, logits: Tensor, tokens: list[int]) -> list[TokenLogprob]:
        ids = self._int32(torch.tensor(tokens))
        best = lane.request.sampling.logprobs - 1
        chosen, values, first = self.model.ops.log_probabilities(logits[:, : self._vocabulary], ids, best)
        rows = zip(tokens, chosen.tolist(), values.tolist(), first.tolist(), strict=True)
        return [TokenLogprob(token, value, list(zip(ids, top, strict=True))) for token, value, top, ids in rows]

    def _slots(self, lane: Lane, start: int, count: int) -> Tensor:
        places = torch.arange(start, start + count)
        return torch.tensor(lane.pages)[places // PAGE] * PAGE + places % PAGE

    def _int32(self, values: Tensor) -> Tensor:
        """On the device; from memory that it may read later, for else the host would wait for all that it has been given."""
        values = values.to(torch.int32).contiguous()
        if self._device.type != "cuda":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)
