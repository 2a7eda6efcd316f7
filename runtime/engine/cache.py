"""The reference's memory of its lanes: pages of the main layers and of the MTP layer, recurrent states, lengths."""

from .kv import PagedKV
from .pages import pages_for
from .states import RecurrentStates
from .weights import ModelWeights


class Cache:
    """The memory of `lanes` lanes for one rank's share of a model.

    pages              size of each pool
    lengths[lane]      tokens whose keys, values and states are in place; the next token stands at this index
    mtp_lengths[lane]  the same for the MTP layer
    """

    def __init__(self, weights: ModelWeights, *, lanes: int, pages: int) -> None:
        sizes = weights.sizes
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

    @staticmethod
    def for_one(weights: ModelWeights, tokens: int) -> "Cache":
        """One lane, open for at most `tokens` tokens."""
        cache = Cache(weights, lanes=1, pages=pages_for(tokens))
        cache.open(0, list(range(cache.pages)))
        return cache

    def open(self, lane: int, pages: list[int]) -> None:
        """Start a lane from nothing in these pages."""
        self.set_pages(lane, pages)
        self.recurrent.reset(lane)
        self.lengths[lane] = self.mtp_lengths[lane] = 0

    def set_pages(self, lane: int, pages: list[int]) -> None:
        """The lane's tokens lie in these pages."""
        self.kv.set_table(lane, pages)
        self.mtp_kv.set_table(lane, pages)

    def close(self, lane: int) -> None:
        """Forget what a lane held."""
        self.open(lane, [])

    def commit(self, lane: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of the lane's round; what lies behind them is overwritten by the next round."""
        self.recurrent.commit(lane, tokens)
        self.lengths[lane] += tokens

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer, the MTP layer's too."""
        self.kv.copy_page(source, target)
        self.mtp_kv.copy_page(source, target)
