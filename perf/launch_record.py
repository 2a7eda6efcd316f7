"""The calls of a decode round as the engine makes them: every operation and every exchange, with its own arguments.

A round of few layers runs once, uncaptured, on operations and a link that remember what they were called with. So what
`bench launches` measures are the engine's own launches, whatever they will be. Keys are those of the ledger's launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention import Sequences
from ..kernels.delta import DeltaState, DeltaWeights
from ..kernels.delta import Round as DeltaRound
from ..kernels.kvcache import DIM, KVCache
from ..kernels.norm import LARGEST
from ..kernels.ops import Ops
from ..kernels.weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight
from ..runtime.parallel.device import DeviceCollective
from .ledger import kv_bytes, passes

MATRICES = (Nvfp4Weight, Fp8Weight, Fp8BlockWeight, HalfWeight)
COLD = (*MATRICES, KVCache, DeltaState)  # what a round finds in the card's memory, not in its second-level cache
EXCHANGES = ("reduce", "reduce_norm", "gather")


@dataclass(frozen=True)
class Call:
    """One call. `key` as in `Launch.key`; `nbytes`: of keys and values, which one key has in many sizes, else 0."""

    op: str
    key: str
    nbytes: float
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_exchange(self) -> bool:
        return self.op in EXCHANGES

    @property
    def asks(self) -> bool:
        """Whether it may ask for what the next launch reads, which then takes less than by itself: while an exchange waits."""
        return self.is_exchange and bool(_cold(self))

    @property
    def cold_bytes(self) -> int:
        """Of what `copied` copies."""
        return sum(part.nbytes for part in self.cold_tensors())

    def cold_tensors(self) -> list[Tensor]:
        """Of what `copied` copies."""
        return [part for one in _cold(self) for part in _tensors(one)]

    @property
    def cold_reads(self) -> float:
        """Bytes that it reads of these; a cache is written in a few places by what does not attend to it, and an exchange asks
        for what the next launch reads."""
        return 0 if self.op == "qkv_rope" or self.is_exchange else self.nbytes or self.cold_bytes

    def copied(self, made: dict[int, Any]) -> Call:
        """The same call over matrices, caches and states of its own; `made` has those that calls share."""
        args = tuple(_copy(one, made) for one in self.args)
        return replace(self, args=args, kwargs={name: _copy(one, made) for name, one in self.kwargs.items()})

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


class Recorder:
    """Wraps operations and a link; while it listens, it keeps their calls."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None

    @contextmanager
    def listening(self) -> Iterator[list[Call]]:
        """The calls made in the block, in their order."""
        calls: list[Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def ops(self, ops: Ops) -> Ops:
        """The same operations, listened to."""
        return replace(ops, **{field.name: self._heard(field.name, getattr(ops, field.name)) for field in fields(ops)})

    def link(self, link: DeviceCollective) -> DeviceCollective:
        """The same link, listened to."""
        return _Heard(link, self._heard)

    def _heard(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._calls is not None:
                key, nbytes = describe(op, args, kwargs)
                self._calls.append(Call(op, key, nbytes, function, args, kwargs))
            return function(*args, **kwargs)

        return call


class _Heard:
    """A link with wrapped exchanges; it has `reduce_norm` only if the link has."""

    def __init__(self, link: DeviceCollective, heard: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self.rank, self.size, self.name, self.halves = link.rank, link.size, link.name, link.halves
        self.reduce_large, self.check = link.reduce_large, link.check
        for name in EXCHANGES:
            if hasattr(link, name):
                setattr(self, name, heard(name, getattr(link, name)))

    reduce: Callable[[Tensor, Tensor], None]
    gather: Callable[[Tensor, Tensor], None]


def describe(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, float]:
    """Key of a call and, where sizes vary under a key, its bytes."""
    kernel, form, tokens, lanes, nbytes = op, "", 1, 1, 0.0
    parts = [*args, *kwargs.values()]
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is not None:
        tokens = first.shape[0]
    if op in ("linear", "linears", "swiglu"):
        matrices = list(_of(parts, MATRICES))
        kernel = op if op == "swiglu" else "linear" if len(matrices) == 1 else "linears"
        form = " ".join(f"{one.encoding}:{one.shape[0]}x{one.shape[1]}" for one in matrices)
    elif op == "embed":
        table = args[1]
        kernel, form = "embed_fp32" if table.dtype == torch.float32 else "embed", str(table.shape[1])
    elif op == "rms_norm":
        assert first is not None
        kernel, form = "rms_norm" if kwargs.get("delta") is None else "rms_norm_delta", str(first.shape[1])
    elif op == "gated_rms_norm":
        assert first is not None
        form = str(first.shape[1])
    elif op == "qkv_rope":
        assert first is not None
        (cache,) = _of(parts, (KVCache,))
        heads = cache.keys.shape[1]
        kernel, form = f"qkv_rope_{_kv(cache)}", f"{(first.shape[1] // DIM - 2 * heads) // 2}/{heads}"
    elif op == "decode_attention":
        assert first is not None
        (cache,), (sequences,) = _of(parts, (KVCache,)), _of(parts, (Sequences,))
        heads, tokens, lanes = cache.keys.shape[1], kwargs["max_tokens"], sequences.starts.shape[0]
        kernel, form = f"attention_{_kv(cache)}", f"{first.shape[1]}/{heads}"
        positions = int((sequences.starts + sequences.counts).sum())
        nbytes = passes(tokens, first.shape[1] // heads) * positions * kv_bytes(heads, DIM, _kv(cache))
    elif op == "delta_decode":
        (weights,), (batch,) = _of(parts, (DeltaWeights,)), _of(parts, (DeltaRound,))
        lanes = batch.lanes.shape[0]
        tokens //= lanes
        form = f"{weights.key_heads}/{weights.value_heads}"
    elif op == "decide":
        kernel = "sampling_adjust"
    elif op == "round_rows":
        tokens = args[3].tokens.shape[0]
    elif op == "round_advance":
        tokens = args[4].shape[0]
    elif op == "scatter_logits":
        kernel = "round_scatter"
    elif op in EXCHANGES:
        assert first is not None
        form = str(first.shape[1])
    return f"{kernel} {form} T{tokens} x{lanes}", nbytes


def staging_call(hidden: int, lanes: int, device: torch.device) -> Call:
    """What stands between the first draft's hidden state and its head, in torch's own kernels; half of it is a launch."""
    x = torch.zeros(lanes, hidden, device=device)
    function = lambda: x.clamp(-LARGEST, LARGEST).half()  # noqa: E731
    return Call("elementwise", f"elementwise {hidden} T{lanes} x1", 0.0, function, (), {})


def _kv(cache: KVCache) -> str:
    return "int8" if cache.is_int8 else "fp16"


def _of(parts: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """What is of `kinds` among arguments, in lists too."""
    if isinstance(parts, kinds):
        yield parts
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _of(part, kinds)


def _cold(call: Call) -> list[Any]:
    found = [*_of(call.args, COLD), *_of(list(call.kwargs.values()), COLD)]
    return list({id(one): one for one in found}.values())


def _tensors(part: Any) -> Iterator[Tensor]:
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value


def _copy(part: Any, made: dict[int, Any]) -> Any:
    if isinstance(part, COLD):
        assert is_dataclass(part)
        if id(part) not in made:
            made[id(part)] = replace(
                part, **{field.name: _clone(getattr(part, field.name)) for field in fields(part) if field.init}
            )
        return made[id(part)]
    if isinstance(part, list | tuple) and type(part) in (list, tuple):
        return type(part)(_copy(one, made) for one in part)
    return part


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
