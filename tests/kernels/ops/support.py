"""Buffers whose surroundings are watched, and the measures of error."""

import numpy as np
import torch

GUARD = 64  # elements before and behind, a multiple of 16 bytes for every type
POISON = {torch.float32: float("nan"), torch.float16: float("nan"), torch.int32: -7, torch.uint8: 0xA5}
HALF_ERROR, WIDE_ERROR = 3e-3, 1e-5  # relative L2: 16-bit outputs, float32 outputs


class Guarded:
    """A poisoned tensor `inner` inside of a larger one; `intact` tells if the surroundings are as they were."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, row: int | None = None
    ) -> None:
        """`row`: elements from row to row, more than a row has, so that there are gaps to watch."""
        columns = int(np.prod(shape[1:]))
        stride = columns if row is None else row
        self.buffer = torch.full((2 * GUARD + shape[0] * stride,), POISON[dtype], dtype=dtype, device=device)
        self._rows = self.buffer[GUARD:-GUARD].view(shape[0], stride)
        self.inner = (
            self._rows[:, :columns].view(shape) if row is None else self._rows[:, :columns].unflatten(1, shape[1:])
        )
        self._columns = columns
        self._before = self._outside().clone()

    def _outside(self) -> torch.Tensor:
        parts = (self.buffer[:GUARD], self._rows[:, self._columns :].flatten(), self.buffer[-GUARD:])
        return torch.cat(parts).view(torch.uint8)

    @property
    def intact(self) -> bool:
        return torch.equal(self._outside(), self._before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def relative(got: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2 error; NaN in either counts as infinite."""
    wide = got.double().cpu().numpy().reshape(expected.shape)
    error = np.linalg.norm(wide - expected) / max(np.linalg.norm(expected), 1e-300)
    return float("inf") if np.isnan(error) else float(error)


def data(kind: str, shape: tuple[int, ...], rng: np.random.Generator, device: torch.device) -> torch.Tensor:
    """float32 of a kind: normal, heavy-tailed, zero, or tiny (about 1e-30)."""
    values = {
        "normal": rng.standard_normal(shape),
        "heavy": np.clip(rng.standard_t(2, shape), -60, 60),
        "zero": np.zeros(shape),
        "tiny": rng.standard_normal(shape) * 1e-30,
    }[kind]
    return torch.from_numpy(values.astype(np.float32)).to(device)


FORBIDDEN = {  # what sm_70 lacks, and what would make a sum depend on timing
    "asynchronous copies": r"\bcp\.async",
    "ldmatrix": r"\bldmatrix",
    "later tensor-core shapes": r"(?<!wmma\.)\bmma\S*\.m(?!8n8k4)\d+n|\bwmma\S*\.m(?!16n16k16)\d+n",
    "bf16, fp8 and fp4 types": r"\.(bf16|e4m3|e5m2|e2m1)",
    "integer to fp16": r"\bcvt\.\S*f16\.[us]\d",
    "atomic sums": r"\b(atom|red)\.\S*\.f(16|32|64)",
    "two halves packed at once": r"\bcvt\.rn\.f16x2",
}
