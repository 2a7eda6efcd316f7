"""The convention of quant_method `fp8` (Qwen's own FP8 releases, transformers): 128 x 128 blocks.

`weight` F8_E4M3 [N, K] and `weight_scale_inv` F32 or BF16 [ceil(N/128), ceil(K/128)], a multiplier despite its name.
Without a `weight_block_size` there is one scale a tensor, and `activation_scale` beside it if that is static.
"""

from typing import Any

from ..errors import InputError
from .base import TILE, Declaration, Scheme, everything, pair, strings, suffix


def declare(config: dict[str, Any], where: str) -> Declaration:
    """Rules of a `quantization_config` of quant_method fp8. Raises InputError for another number format."""
    if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise InputError(f"{where}: fmt {fmt!r}; FP8 is read as e4m3.")
    size = config.get("weight_block_size")
    tile = TILE if size is None else pair(size, "weight_block_size", where)
    scales = ("tile",) if size is not None else ("tensor", "row", "tile")
    key = "modules_to_not_convert" if "modules_to_not_convert" in config else "ignored_layers"  # an older spelling
    ignored = strings(config.get(key), key, where)
    scheme = Scheme("fp8_e4m3", scales, "fp8", tile)
    return Declaration("fp8", where, [(everything("every linear layer"), scheme)], [suffix(text) for text in ignored])
