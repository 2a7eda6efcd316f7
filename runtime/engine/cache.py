"""Everything a lane remembers: pages of the main layers and of the MTP layer, recurrent states, lengths."""

from .pages import PagedKV, pages_for
from .states import RecurrentStates
from .weights import ModelWeights


class Cache:
    """The memory of `lanes` lanes for one rank's share of a model.

    pages              size of each pool
    lengths[lane]      tokens whose keys, values and states are in place; the next token stands at this index
    mtp_lengths[lane]  the same for the MTP layer
    rope_deltas[lane]  rotary position minus index for tokens after the prompt (not 0 after images)
    """

    def __init__(self, weights: ModelWeights, *, lanes: int, max_context: int, pages: int | None = None) -> None:
        sizes = weights.sizes
        pages = lanes * pages_for(max_context) if pages is None else pages
        self.pages = pages
        attention = sum(1 for kind in weights.kinds if kind == "full_attention")
        self.kv = PagedKV(attention, sizes.kv_heads, sizes.head_dim, pages, lanes)
        self.mtp_kv = PagedKV(1 if weights.mtp else 0, sizes.kv_heads, sizes.head_dim, pages, lanes)
        self.recurrent = RecurrentStates(
            len(weights.kinds) - attention,
            lanes,
            sizes.conv_width,
            sizes.conv_channels,
            (sizes.value_heads, sizes.value_dim, sizes.key_dim),
        )
        self.lengths = [0] * lanes
        self.mtp_lengths = [0] * lanes
        self.rope_deltas = [0] * lanes

    @property
    def free_pages(self) -> int:
        """Pages free in both pools together."""
        return self.kv.free_pages + self.mtp_kv.free_pages

    def claim(self, lane: int, tokens: int) -> bool:
        """Prepare an empty lane for at most `tokens` tokens; False if too few pages are free."""
        if not self.kv.claim(lane, tokens):
            return False
        claimed = self.mtp_kv.claim(lane, tokens)
        assert claimed, "both pools have the same pages and the same claims"
        self.recurrent.reset(lane)
        self.lengths[lane] = self.mtp_lengths[lane] = self.rope_deltas[lane] = 0
        return True

    def release(self, lane: int) -> None:
        """Give back everything a lane holds."""
        self.kv.release(lane)
        self.mtp_kv.release(lane)
        self.recurrent.reset(lane)
        self.lengths[lane] = self.mtp_lengths[lane] = self.rope_deltas[lane] = 0

    def commit(self, lane: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of the lane's round; what lies behind them is overwritten by the next round."""
        self.recurrent.commit(lane, tokens)
        self.lengths[lane] += tokens
