"""What the CUDA backend keeps on the device: pools, recurrent states, lanes, and the buffers of passes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.delta import DeltaState, Progress
from ....kernels.kvcache import KVCache
from ....kernels.linear import MAX_TOKENS
from ....kernels.round_state import MOST_ROWS, Lanes
from ....kernels.sampling_state import LaneSampling
from ..pages import pages_for
from .packed import Packed, sizes
from .weights import CudaAttention, CudaDelta, CudaWeights


@dataclass(frozen=True)
class SavedState:
    """A lane after `length` tokens, in the host's memory.

    delta   per layer of the delta rule its state and the convolution's last inputs; None where there is no such layer
    hidden  float32 [n, H]: the last n hidden states, those that the MTP layer has not read
    """

    length: int
    delta: Packed | None
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes + (0 if self.delta is None else self.delta.nbytes)


class CudaState:
    """The memory of `lanes` lanes for one rank's share of a model.

    kv, mtp_kv  pools of the attention layers and of the MTP layer (None: there is none); they share page numbers
    delta       states of the delta rule's layers, and `progress`, how far each lane is in all of them
    lanes       what the device knows of each lane; `hidden` float32 [lanes, 6, H]: states that the MTP layer has not read,
                always the last one at least
    sampling    what each lane asked for, and its history, over the ids that may be drawn
    forced      int32 [lanes]: how many drafts stand whatever the logits say, for measuring; -1: as they say
    overflows   int32 [25]: values that fp16 could not hold, a row of a pass each, then those counted elsewhere
    attended, delta_out   outputs of a pass, whose unused rows keep what they had: no number but a finite one
    """

    def __init__(
        self, weights: CudaWeights, *, lanes: int, pages: int, context: int, int8: bool, vocabulary: int
    ) -> None:
        device, sizes = weights.device, weights.sizes
        hidden = weights.config.text.hidden_size
        mixers = [layer.mixer for layer in weights.layers]
        attention = sum(isinstance(mixer, CudaAttention) for mixer in mixers)
        self.pages, self.device = pages, device
        self.kv = [KVCache.empty(pages, sizes.kv_heads, int8=int8, device=device) for _ in range(attention)]
        self.mtp_kv = None
        if weights.mtp is not None:
            self.mtp_kv = KVCache.empty(pages, sizes.kv_heads, int8=int8, device=device)
        self.delta = [DeltaState.empty(lanes, mixer.delta) for mixer in mixers if isinstance(mixer, CudaDelta)]
        self.progress = Progress.empty(lanes, device)
        self.lanes = Lanes.empty(lanes, pages_for(context), device)
        self.hidden = torch.zeros(lanes, MOST_ROWS, hidden, device=device)
        self.sampling = LaneSampling.empty(lanes, vocabulary, device)
        self.forced = torch.full((lanes,), -1, dtype=torch.int32, device=device)
        self.overflows = torch.zeros(MAX_TOKENS + 1, dtype=torch.int32, device=device)
        query = sizes.query_heads * sizes.head_dim
        self.attended = torch.zeros(MAX_TOKENS, query, dtype=torch.float16, device=device)
        self.delta_out = torch.zeros(MAX_TOKENS, sizes.value_heads, sizes.value_dim, device=device)

    @property
    def pools(self) -> list[KVCache]:
        return self.kv if self.mtp_kv is None else [*self.kv, self.mtp_kv]

    @property
    def counter(self) -> Tensor:
        """int32 [1], of the overflows that no row of a pass has."""
        return self.overflows[MAX_TOKENS:]

    def reset(self, lane: int) -> None:
        """Start a lane from nothing, at rest."""
        for memory in self.delta:
            memory.state[lane].zero_()
            memory.rows[:, lane].zero_()
        self.progress.accepted[lane] = 0
        self.progress.turn[lane] = 0
        self.lanes.limits[lane] = 0
        self.lanes.lengths[lane] = 0
        self.lanes.kept[lane] = 1

    def set_table(self, lane: int, pages: list[int]) -> None:
        """Say which pages a lane's tokens lie in."""
        self.lanes.tables[lane, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.device)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer."""
        for pool in self.pools:
            for part in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
                if part is not None:
                    part[target] = part[source]

    def saved(self, lane: int, length: int, kept: int) -> SavedState:
        """Copies of a lane that stands at the end of its tokens (`accepted` 0), which has `kept` hidden states."""
        parts = self._parts(lane, int(self.progress.turn[lane]))
        return SavedState(length, Packed(parts) if parts else None, _kept(self.hidden[lane, :kept]))

    def load(self, lane: int, saved: SavedState) -> None:
        """Put a lane, just reset, where `saved` was; of the hidden states it keeps the last."""
        if saved.delta is not None:
            saved.delta.put_back(self._parts(lane, 0))
        self.hidden[lane, 0].copy_(saved.hidden[-1], non_blocking=True)
        self.lanes.lengths[lane] = saved.length

    @property
    def state_bytes(self) -> int:
        """What one saved state takes at most."""
        return sum(sizes(sum(part.nbytes for part in self._parts(0, 0)))) + _kept_bytes(self.hidden[0])

    def _parts(self, lane: int, turn: int) -> list[Tensor]:
        """What a lane's next token depends on in the layers of the delta rule, where nothing is left to replay."""
        return [part for memory in self.delta for part in (memory.state[lane], memory.rows[turn, lane, :3])]


def _kept(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, which the stream writes and reads in its order: nobody waits for it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor, non_blocking=True)


def _kept_bytes(tensor: Tensor) -> int:
    """What such a copy takes: torch hands page-locked memory out in powers of two."""
    return tensor.nbytes if tensor.device.type == "cpu" else 1 << (tensor.nbytes - 1).bit_length()
