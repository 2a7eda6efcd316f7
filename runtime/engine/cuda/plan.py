"""What a rank needs of its card's memory, part by part, before anything is loaded; and the longest context that fits.

Sizes of caches and states are taken from the same constructors that allocate them, on torch's `meta` device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ....checkpoint.errors import EnvironmentFault
from ....kernels.delta import DeltaState, DeltaWeights
from ....kernels.delta_chunks import workspace_bytes as delta_bytes
from ....kernels.kvcache import DIM, KVCache
from ....kernels.prefill import ahead_elements
from ....kernels.prefill import workspace_bytes as linear_bytes
from ....kernels.sampling_state import Distributions, LaneSampling
from ....kernels.weights import BAND
from ....model.config import FULL, ModelConfig
from ..pages import PAGE, pages_for
from ..vision import PROJECTION_BYTES, ROWS_AT_ONCE
from .layers import captures
from .weights import tensors_of

MARGIN = 256 << 20  # left free: what the driver and the allocator round up, and other programs' small change
GRAPHS = 192 << 20  # of captured rounds and kernels' code
SPARE = 1 << 30  # of what is left, not for weights that are only kept because there is room
STREAM = 32 << 20  # of the vendor's products on another stream: what torch gives them on compute capability 9.0
META = torch.device("meta")


@dataclass(frozen=True)
class Demand:
    """What one rank is to do.

    weights, vision  bytes of the model's weights on the card, of the vision tower's among them
    picture_patches  of the largest picture; 0: no pictures are read
    keys_in_a_row    prompts' attention takes keys and values from a copy in a row, not from the pages as on a V100; such cards
                     multiply gate and up side by side too
    captured         rounds, and prompts' chunks that are not too long, run as graphs, which have memory of their own
    ahead            layers for whose plain weights there is memory that all chunks share, so that they are made beside the
                     products before them; 0: none
    keep             bytes of plain weights that may stay in memory that is left; None: as many as there are
    """

    config: ModelConfig
    tp: int
    weights: int
    kv: str
    lanes: int
    drafts: int
    chunk: int
    vision: int = 0
    picture_patches: int = 0
    keys_in_a_row: bool = True
    captured: bool = True
    ahead: float = 0.0
    keep: int | None = 0


@dataclass(frozen=True)
class MemoryPlan:
    """`parts`: name -> bytes, in the order they are told; `kept`: bytes of plain weights that stay, in memory that nothing else
    wants; `free`: bytes the card had free, None: not asked."""

    demand: Demand
    max_context: int
    pages: int
    parts: dict[str, int]
    free: int | None = None
    kept: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def kv_token(self) -> int:
        """Bytes of keys and values a token, MTP layer included."""
        return self.parts["kv"] // (self.pages * PAGE)

    def lines(self) -> Iterator[str]:
        """A line a part, and the sum."""
        for name, nbytes in self.parts.items():
            detail = ""
            if name == "kv":
                detail = f"  {self.demand.kv}, {self.kv_token:,} bytes a token, {self.pages:,} pages of {PAGE} tokens"
            elif name == "states":
                detail = f"  {nbytes // self.demand.lanes / 1e6:.1f} MB a lane"
            elif name == "plain weights" and self.kept:
                share = self.kept / plain_bytes(self.demand.config, self.demand.tp)
                detail = f"  {self.kept / 1e9:.2f} GB kept, {share:.0%} of all: prompts are read faster"
            if nbytes:
                yield f"  {name:<13} {nbytes / 1e9:8.3f} GB{detail}"
        of = "" if self.free is None else f" of {self.free / 1e9:.2f} GB free"
        yield f"  {'together':<13} {self.total / 1e9:8.3f} GB{of}; context {self.max_context:,}"


def plan_memory(demand: Demand, max_context: int, pages: int, kept: int = 0) -> MemoryPlan:
    """The parts for a context and a pool of pages, with `kept` bytes of plain weights."""
    parts = {
        "weights": demand.weights - demand.vision,
        "vision tower": demand.vision,
        "kv": pages * page_bytes(demand),
        "states": demand.lanes * state_bytes(demand),
        "sampling": _sampling_bytes(demand),
        "workspace": max(_chunk_bytes(demand, max_context), _picture_bytes(demand)),
        "plain weights": _ahead_bytes(demand) + kept,
        "graphs": GRAPHS + _captured_bytes(demand),
    }
    return MemoryPlan(demand, max_context, pages, parts, kept=kept)


def fit(demand: Demand, free: int, max_context: int | None, limit: int, pages: int | None = None) -> MemoryPlan:
    """The plan for a card with `free` bytes.

    max_context None: the longest that fits, up to `limit`. The pool gets a page for every token of every lane where that
    fits, else what there is room for, at least one lane at full context. What is left then is for plain weights that stay.
    Raises EnvironmentFault with the longest context that would fit, if the wanted one does not.
    """
    room = free - MARGIN
    wanted = longest_context(demand, room, limit) if max_context is None else max_context
    if wanted < PAGE and max_context is None:
        parts = plan_memory(demand, PAGE, pages_for(PAGE))
        raise EnvironmentFault(_refusal(replace(parts, free=free), 0))
    if pages is None:
        most = demand.lanes * pages_for(wanted)
        pages = max(pages_for(wanted), min(most, _pages_within(demand, room, wanted)))
    plan = replace(plan_memory(demand, wanted, pages), free=free)
    if plan.total > room:
        raise EnvironmentFault(_refusal(plan, longest_context(demand, room, limit)))
    return replace(plan_memory(demand, wanted, pages, room_to_keep(demand, room - plan.total)), free=free)


def room_to_keep(demand: Demand, left: int) -> int:
    """Bytes of plain weights that stay, of `left` bytes that nothing else wants."""
    every = plain_bytes(demand.config, demand.tp)
    return max(0, min(every if demand.keep is None else min(demand.keep, every), left - SPARE))


def longest_context(demand: Demand, room: int, limit: int) -> int:
    """The longest context, a multiple of a page up to `limit`, of which one lane fits in `room` bytes; 0: none."""
    low, high = 0, pages_for(limit)
    while low < high:
        middle = (low + high + 1) // 2
        if plan_memory(demand, middle * PAGE, middle).total <= room:
            low = middle
        else:
            high = middle - 1
    return min(low * PAGE, limit)


def page_bytes(demand: Demand) -> int:
    """Keys and values of one page in all attention layers and the MTP layer."""
    text = demand.config.text
    heads = max(1, text.num_key_value_heads // demand.tp)
    layers = text.layer_types.count(FULL) + demand.config.mtp_layers
    return layers * _bytes_of(KVCache.empty(1, heads, int8=demand.kv == "int8", device=META))


def state_bytes(demand: Demand) -> int:
    """Recurrent states and the rows of the last round of one lane."""
    text = demand.config.text
    layers = len(text.layer_types) - text.layer_types.count(FULL)
    if not layers:
        return 0
    heads = text.linear_num_value_heads // demand.tp
    channels = (2 * text.key_dim + text.value_dim) // demand.tp
    small = (torch.empty(heads, device=META) for _ in range(2))
    weights = DeltaWeights(torch.empty(channels, text.linear_conv_kernel_dim, device=META), *small)
    return layers * _bytes_of(DeltaState.empty(1, weights))


def _pages_within(demand: Demand, room: int, max_context: int) -> int:
    rest = plan_memory(demand, max_context, 0)
    return max(0, (room - rest.total) // page_bytes(demand))


def _sampling_bytes(demand: Demand) -> int:
    """Histories of the lanes, distributions of drafts and of verified rows, logits of a share and of the whole."""
    vocabulary, rows = demand.config.text.vocab_size, demand.lanes * (1 + demand.drafts)
    kept = Distributions.empty(rows + demand.lanes * demand.drafts, vocabulary, META)
    logits = 2 * 4 * rows * vocabulary
    return _bytes_of(LaneSampling.empty(demand.lanes, vocabulary, META)) + _bytes_of(kept) + logits


def _ahead_bytes(demand: Demand) -> int:
    """Plain weights that are made ahead, and the memory that the vendor's library takes for another stream."""
    nbytes = ahead_bytes(demand.config, demand.tp, demand.ahead)
    return nbytes + STREAM if nbytes else 0


def ahead_bytes(config: ModelConfig, tp: int, layers: float) -> int:
    """Plain weights of so many layers, and of the largest matrix at least; 0 for none."""
    text = config.text
    mixed = max(text.num_attention_heads * text.head_dim, text.value_dim) // tp
    layer = text.hidden_size * (_projection(config, tp) + mixed + 3 * text.intermediate_size // tp)
    return 2 * ahead_elements(layer, _largest(config, tp, together=True), layers) if layers else 0


def plain_bytes(config: ModelConfig, tp: int) -> int:
    """All matrices of a rank's layers in fp16, without the MTP layer's and the heads."""
    text = config.text
    kv_heads = max(1, text.num_key_value_heads // tp)
    attention = (
        2 * (text.num_attention_heads // tp + kv_heads) * text.head_dim,
        text.num_attention_heads * text.head_dim,
    )
    delta = (2 * text.key_dim + 2 * text.value_dim + 2 * text.linear_num_value_heads) // tp, text.value_dim
    rows = 0
    for kind in text.layer_types:
        projection, mixed = attention if kind == FULL else delta
        rows += projection + -projection % BAND + mixed // tp + 3 * text.intermediate_size // tp
    return 2 * text.hidden_size * rows


def _projection(config: ModelConfig, tp: int) -> int:
    """Rows of a layer's widest input product."""
    text, kv_heads = config.text, max(1, config.text.num_key_value_heads // tp)
    return max(
        2 * (text.num_attention_heads // tp + kv_heads) * text.head_dim,
        (2 * text.key_dim + 2 * text.value_dim + 2 * text.linear_num_value_heads) // tp,
    )


def _largest(config: ModelConfig, tp: int, together: bool) -> int:
    """Values of the largest matrix that a chunk multiplies; `together`: gate and up are one."""
    text = config.text
    # The MTP layer's first matrix takes two hidden states side by side, and is not split.
    gates = text.intermediate_size // tp * (2 if together else 1)
    return text.hidden_size * max(gates, _projection(config, tp), 2 * text.hidden_size)


def _chunk_bytes(demand: Demand, max_context: int) -> int:
    """A prompt's chunk on its way through a layer, and keys and values in a row."""
    text = demand.config.text
    kv_heads = max(1, text.num_key_value_heads // demand.tp)
    keys_and_values = 2 * 2 * kv_heads * DIM * PAGE * pages_for(max_context) if demand.keys_in_a_row else 0
    tables = 2 * 4 * text.rotary_dim // 2 * max_context
    return _layer_bytes(demand) + keys_and_values + tables


def _captured_bytes(demand: Demand) -> int:
    """What a captured chunk needs in the graphs' own memory, and what it keeps between them."""
    if not (demand.captured and captures(demand.chunk)):
        return 0
    text, tp = demand.config.text, demand.tp
    kv_heads = max(1, text.num_key_value_heads // tp)
    query = text.num_attention_heads // tp * text.head_dim
    sums = 6 * text.hidden_size if tp > 1 else 0
    kept = 10 * text.hidden_size + 4 * 2 * (query + kv_heads * text.head_dim) + 4 * query + sums
    return _layer_bytes(demand) + demand.chunk * kept


def _layer_bytes(demand: Demand) -> int:
    """A prompt's chunk on its way through a layer, plain weights of a large product."""
    text, tp = demand.config.text, demand.tp
    token = 14 * text.hidden_size + 12 * _projection(demand.config, tp) + 6 * text.intermediate_size // tp
    plain = linear_bytes(0 if demand.ahead else _largest(demand.config, tp, demand.keys_in_a_row))
    heads = text.linear_num_value_heads // tp
    delta = delta_bytes(demand.chunk, heads, 2 * text.linear_num_key_heads // tp + heads)
    return demand.chunk * token + plain + delta


def _picture_bytes(demand: Demand) -> int:
    """The largest picture on its way through the tower, in float32.

    Residual, its norm, what attention gives (twice while it is put together) and its projection; some heads' queries, keys
    and values, plain and turned; the inner values of some rows.
    """
    vision = demand.config.vision
    if vision is None or not demand.picture_patches:
        return 0
    rows = demand.picture_patches
    inner = 4 * 2 * min(rows, ROWS_AT_ONCE) * vision.intermediate_size
    projected = min(PROJECTION_BYTES, 4 * 3 * rows * vision.hidden_size)
    return 4 * rows * 5 * vision.hidden_size + 2 * projected + inner


def _bytes_of(part: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(part))


def _refusal(plan: MemoryPlan, longest: int) -> str:
    demand, told = plan.demand, "\n".join(plan.lines())
    if longest >= PAGE:
        remedy = f"The longest context that fits is {longest:,}: --max-context {longest}"
        remedy += ", or fewer --lanes" if demand.lanes > 1 else ""
        remedy += ", or --kv int8" if demand.kv == "fp16" else ""
    else:
        remedy = "Not even a short context fits: split over more cards, or convert with a smaller recipe"
    return f"the card's memory does not hold this:\n{told}\n{remedy}."
