"""Other projects' quantisers, where they are installed: what `bench pipeline` measures ours against."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Quantise = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Peer:
    """`quantise` takes a BF16 matrix; None, and why, if the library cannot be used."""

    name: str
    quantise: Quantise | None
    missing: str = ""


def _modelopt() -> Quantise:
    tensors = importlib.import_module("modelopt.torch.quantization.qtensor")
    return lambda weight: tensors.NVFP4QTensor.quantize(weight, 16)


def _llmcompressor() -> Quantise:
    """What its `model_free_ptq` does for each weight of the scheme FP8_DYNAMIC."""
    lifecycle = importlib.import_module("llmcompressor.entrypoints.model_free.lifecycle")
    compressors = importlib.import_module("compressed_tensors.compressors")
    schemes = importlib.import_module("compressed_tensors.quantization")
    scheme = schemes.preset_name_to_scheme("FP8_DYNAMIC", targets=["Linear"])

    def quantise(weight: torch.Tensor) -> object:
        module = lifecycle.initialize_quantized_linear(weight, scheme, "cpu")
        lifecycle.calibrate_weight(module)
        compressors.compress_module(module)
        return module

    return quantise


def _peer(name: str, find: Callable[[], Quantise]) -> Peer:
    try:
        return Peer(name, find())
    except Exception as error:  # another version of a library may fail in any way; the benchmark says so and goes on
        return Peer(name, None, f"{type(error).__name__}: {error}".splitlines()[0])


def nvfp4_peer() -> Peer:
    """ModelOpt's NVFP4."""
    return _peer("ModelOpt NVFP4QTensor.quantize", _modelopt)


def fp8_peer() -> Peer:
    """llmcompressor's FP8 with a scale a row."""
    return _peer("llmcompressor FP8 per channel", _llmcompressor)
