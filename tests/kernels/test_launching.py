"""Arguments of a kernel as the driver reads them. No GPU."""

import ctypes
import types

import pytest
import torch

from duovolt.kernels import module
from duovolt.kernels.launching import Parameters
from duovolt.kernels.module import Module


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_int32))


def test_the_driver_finds_every_value_behind_its_pointer() -> None:
    tensor, pair = torch.zeros(3), Pair(5, -7)
    made = Parameters((tensor, -3, 2**31 + 1, 0.1, None, pair, ctypes.c_void_p(2**40), True))
    pointers = (ctypes.c_void_p * 8).from_address(made.address)

    def at(place: int, kind: type) -> object:
        return kind.from_address(pointers[place] or 0)

    assert at(0, ctypes.c_uint64).value == tensor.data_ptr()
    assert at(1, ctypes.c_int32).value == -3 and at(2, ctypes.c_uint32).value == 2**31 + 1
    assert at(3, ctypes.c_float).value == ctypes.c_float(0.1).value
    assert (
        at(4, ctypes.c_uint64).value == 0 and at(6, ctypes.c_uint64).value == 2**40 and at(7, ctypes.c_int32).value == 1
    )
    found = at(5, Pair)
    assert (found.first, found.second) == (5, -7)


def test_values_that_float32_does_not_hold_become_infinite() -> None:
    made = Parameters((1e300, float("nan")))
    pointers = (ctypes.c_void_p * 2).from_address(made.address)
    first, second = (ctypes.c_float.from_address(address or 0).value for address in pointers)
    assert first == float("inf") and second != second


def test_a_launch_that_is_kept_belongs_to_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be launching with it: on its own stream, whatever this one does."""
    bindings = types.SimpleNamespace(
        CUlaunchAttribute=lambda: types.SimpleNamespace(value=types.SimpleNamespace()),
        CUlaunchAttributeID=types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
        CUlaunchConfig=types.SimpleNamespace,
        cuLaunchKernelEx=lambda config, function, address, extra: (launched.append((config, config.hStream)), (0,))[1],
    )
    launched: list[tuple[object, int]] = []
    own = Module.__new__(Module)
    own.arch, own._device, own._handle, own._driver = "sm_90", 0, 7, bindings
    own._functions, own._shared, own._configs, own.overlaps = {"copy": 1}, {}, {}, True
    monkeypatch.setattr(module, "current_context", lambda: 7)
    for stream in (5, 9, 5):
        monkeypatch.setattr(module, "current_stream", lambda device, stream=stream: stream)
        with module.overlapping():
            own.launch("copy", 1, 32, (1,), overlap=True)
    (first, _), (second, _), (third, _) = launched
    assert [stream for _, stream in launched] == [5, 9, 5] and first is third and first is not second
    assert (first.hStream, second.hStream) == (5, 9)
