"""Kernels that do wrong: where a tool does not find them, what it does not find elsewhere says nothing."""

from pathlib import Path

import torch

from duovolt.kernels import module as mod
from duovolt.kernels import norm, nvrtc

from .launching import NATIVE, empty, randn, tell, zeros


def _control():
    """Compiled here, by the NVRTC that the kernels' own builds use."""
    text = Path(__file__).with_name("control.cu").read_bytes()
    image = nvrtc.load().compile("control.cu", text, {}, [f"--gpu-architecture={NATIVE}", "--std=c++17"], "CUBIN")
    keep = mod._first_image
    mod._first_image = lambda *a: (NATIVE, image)
    try:
        return mod.Module("control.cu", 0, [NATIVE])
    finally:
        mod._first_image = keep


def control_init():
    module = _control()
    x, out = empty(256), zeros(256)
    x[:128] = 1.0
    torch.cuda.synchronize()
    tell("control: 128 reads of what is not written")
    module.launch("control_read", 1, 256, (x, out, 256))
    torch.cuda.synchronize()
    tell("control: none")
    module.launch("control_read", 1, 256, (x, out, 128))
    torch.cuda.synchronize()
    tell("control: a norm of rows of which one is not written (5,120 floats)")
    rows = empty(2, 5120)
    rows[0] = 1.0
    norm.rms_norm(rows, randn(5120), 1e-6)
    torch.cuda.synchronize()
    tell("control: the same as PTX of compute_70")
    with mod.forced_arch(mod.PORTABLE):
        norm.rms_norm(rows, randn(5120), 1e-6)
    torch.cuda.synchronize()


def control_race():
    module = _control()
    out, words, more = zeros(256, dtype=torch.int32), zeros(1024, dtype=torch.int32), zeros(1024, dtype=torch.int32)
    for name, arguments in (
        ("control_race", (out,)),
        ("control_sound", (out,)),
        ("control_race_async", (words, more)),
        ("control_unawaited", (words, more)),
    ):
        torch.cuda.synchronize()
        tell("control:", name)
        module.launch(name, 1, 256, arguments)
    torch.cuda.synchronize()


def control_mem():
    module = _control()
    kept = [zeros(100), zeros(128), zeros(128), zeros(128)]
    for name, arguments, shared in (
        ("control_past", (kept[0], 100), 0),  # into what is left of 512 bytes
        ("control_past", (kept[1], 128), 0),  # where another tensor may stand: found by --padding
        ("control_read_past", (kept[0], kept[1], 100), 0),
        ("control_shared_past", (kept[2], 64), 256),
    ):
        tell("control:", name, arguments[-1])
        try:
            module.launch(name, 1, 64, arguments, shared)
            torch.cuda.synchronize()
        except Exception as error:
            tell("stopped, as it should be:", repr(error)[:120])
