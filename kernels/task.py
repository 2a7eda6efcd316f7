"""What a launch of the decode linear is told: the structures of csrc/linear_task.cuh, filled from tensors."""

import ctypes

from torch import Tensor

from .weights import BAND, GROUP, TURN, Fp8BlockWeight, Nvfp4Weight, Weight

MATRICES = 8  # of one launch
ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half")
FLOAT, HALF, SWIGLU = range(3)  # what follows the product
HALF_ROWS = 16  # of an item that is half a band


class Matrix(ctypes.Structure):
    """One matrix of a launch."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("group_scales", ctypes.c_void_p),
        ("block_scales", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("first_band", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int),
        ("encoding", ctypes.c_int),
        ("block_bands", ctypes.c_int),
        ("block_turns", ctypes.c_int),
        ("block_columns", ctypes.c_int),
    ]


class Cut(ctypes.Structure):
    """Shares of a launch in slices of K: whole bands of every block, units of what is left over, blocks that have one more,
    and slots for sums of a block between two barriers."""

    _fields_ = [("bands", ctypes.c_int), ("units", ctypes.c_int), ("more", ctypes.c_int), ("round", ctypes.c_int)]


class Task(ctypes.Structure):
    """A launch: one argument, passed by value."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("overflows", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("items", ctypes.c_int),
        ("matrices", ctypes.c_int),
        ("epilogue", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("cut", Cut),
        ("matrix", Matrix * MATRICES),
    ]


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def task(
    x: Tensor,
    weights: list[Weight],
    outs: list[Tensor],
    epilogue: int,
    residuals: list[Tensor | None] | None = None,
    overflows: Tensor | None = None,
) -> Task:
    """The launch of `weights` on x [T, K], a band an item. For SWIGLU, gate and up share outs[0]. Pointers only: keep the
    tensors."""
    filled = Task(
        x=x.data_ptr(),
        overflows=pointer(overflows),
        tokens=x.shape[0],
        groups=x.shape[1] // GROUP,
        matrices=len(weights),
        epilogue=epilogue,
        rows=BAND,
    )
    first_band = 0
    for index, weight in enumerate(weights):
        out = outs[0] if epilogue == SWIGLU else outs[index]
        filled.matrix[index] = matrix_of(weight, first_band)
        filled.matrix[index].residual = None if residuals is None else pointer(residuals[index])
        filled.matrix[index].out = out.data_ptr()
        filled.matrix[index].out_stride = out.stride(0)
        if epilogue != SWIGLU:
            first_band += weight.words.shape[0]
    filled.items = weights[0].words.shape[0] if epilogue == SWIGLU else first_band
    return filled


def halve(filled: Task) -> None:
    """Makes items of half a band each of those of a whole one; for SwiGLU sixteen rows of gate and the same of up."""
    assert filled.rows == BAND
    filled.rows = HALF_ROWS
    filled.items *= 2


def matrix_of(weight: Weight, first_band: int = 0) -> Matrix:
    """A weight without its outputs."""
    known = weight.__dict__.get("_matrix")
    if known is None or known.words != weight.words.data_ptr():  # a copy of a weight has the other's
        known = _filled(weight)
        object.__setattr__(weight, "_matrix", known)  # derived from the frozen fields, and asked for at each launch
    matrix = Matrix.from_buffer_copy(known)
    matrix.first_band = first_band
    return matrix


def _filled(weight: Weight) -> Matrix:
    matrix = Matrix(
        words=weight.words.data_ptr(),
        rows=weight.shape[0],
        encoding=ENCODINGS.index(weight.encoding),
    )
    if isinstance(weight, Nvfp4Weight):
        matrix.group_scales = weight.block_scale.data_ptr()
    if isinstance(weight, Fp8BlockWeight):
        matrix.block_scales = weight.block_scale.data_ptr()
        matrix.block_bands, matrix.block_turns = weight.block[0] // BAND, weight.block[1] // TURN
        matrix.block_columns = weight.block_scale.shape[1]
    else:
        matrix.scale = weight.scale.data_ptr()
        matrix.scale_stride = 0 if weight.scale.numel() == 1 else 1
    return matrix
