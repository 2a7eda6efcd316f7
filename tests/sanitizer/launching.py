"""What every part uses: where it runs, what it launches, and small tensors of which each byte is written."""

import contextlib
import re
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from duovolt.kernels import build
from duovolt.kernels import linear as lin
from duovolt.kernels import module as mod
from duovolt.kernels.weights import BAND, GROUP, Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight
from duovolt.perf.streams import streams

NATIVE, VOCABULARY = "sm_90", 248320
ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half")


class Here:
    """The device; the tool that looks on ("init", "mem", "race"; "plain": none); a file for what was launched; recorded: there is
    no card, and a recorder in the kernels' place."""

    device = torch.device("cpu")
    tool = "plain"
    record: Path | None = None
    recorded = False


here = Here()
begin = time.time()
launched: Counter[tuple[str, str, str]] = Counter()
fresh: Counter[tuple[str, str, str]] = Counter()
faults: list[str] = []


def sides(count):
    """Streams that run side by side."""
    return [None] * count if here.recorded else streams(here.device, count)


def tell(*words):
    print(f"{time.time() - begin:7.2f} s", *words, flush=True)


def record(source, name, arch):
    launched[source, name, arch] += 1
    fresh[source, name, arch] += 1


def flush_record():
    if here.record:
        with here.record.open("a") as file:
            file.writelines(f"{source} {name} {arch} {n}\n" for (source, name, arch), n in fresh.items())
    fresh.clear()


def watch():
    """Notes every launch from here on."""
    init, launch = mod.Module.__init__, mod.Module.launch

    def made(self, source, *rest, **more):
        self.source = source
        init(self, source, *rest, **more)

    def started(self, name, *rest, **more):
        launch(self, name, *rest, **more)
        record(self.source, name, self.arch)

    mod.Module.__init__, mod.Module.launch = made, started


def names_in(source, arch):
    """Kernels of a compiled source."""
    image = build.image_for(source, arch)
    found = re.findall(rb"\0\.text\.(\w+)\0", image) if arch.startswith("sm_") else re.findall(rb"\.entry (\w+)", image)
    return sorted({name.decode() for name in found})


def run(name, call):
    """One group of launches."""
    start = time.time()
    try:
        call()
        torch.cuda.synchronize()
        tell("ran", name, f"{time.time() - start:.2f}")
    except Exception as error:
        tell("fault", name, repr(error)[:300])
        faults.append(name)
        if here.recorded:
            traceback.print_exc()
        else:
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                tell("context lost:", repr(lost)[:100])
                flush_record()
                sys.exit(3)
    flush_record()


def touch(*tensors):
    """Read all of results that must be whole: under initcheck a gap is an error."""
    if here.tool == "race":
        return
    for tensor in tensors:
        torch.count_nonzero(tensor)


def right(got, reference, *arguments):
    """Without a tool and on a card: near the reference. A wrong way would be looked at for nothing."""
    if here.tool != "plain":
        return
    wanted = reference(*arguments)
    assert wanted.shape == got.shape
    if here.recorded:
        return
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    assert error <= 4e-3, f"relative error {error:.2g}"


@contextlib.contextmanager
def patched(place, **values):
    old = {name: getattr(place, name) for name in values}
    for name, value in values.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(place, name, value)


def processors(count, place=lin, name="multiprocessors"):
    """As on a card of so many multiprocessors, so that small launches go the ways of large ones; 0: as here."""
    return patched(place, **{name: lambda device: count}) if count else contextlib.nullcontext()


generator = torch.Generator().manual_seed(5)


def randn(*shape, scale=1.0):
    """Made on the host: a copy writes all of it."""
    return (torch.randn(shape, generator=generator) * scale).to(here.device)


def half(*shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).half().to(here.device)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32).to(here.device)


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=here.device)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype).to(here.device)


def weight(encoding, rows, columns):
    bands, groups = -(-rows // BAND), columns // GROUP

    def words(*shape, mask=0xBF):
        return (torch.randint(0, 256, shape, generator=generator) & mask).to(torch.uint8).to(here.device)

    if encoding == "half":
        made = HalfWeight.of((torch.randn(rows, columns, generator=generator) / 16).half())
        return HalfWeight(made.words.to(here.device), made.scale.to(here.device))
    if encoding == "nvfp4":
        scale = torch.full((1,), 2.0**-8).to(here.device)
        return Nvfp4Weight(words(bands, groups, BAND, 8, mask=0xFF), words(bands, groups, BAND, mask=0x3F), scale)
    if encoding == "fp8":
        return Fp8Weight(words(bands, groups, BAND, 16), (torch.rand(rows, generator=generator) / 64).to(here.device))
    grid = -(-rows // 128), -(-columns // 128)
    return Fp8BlockWeight(words(bands, groups, BAND, 16), (torch.rand(grid, generator=generator) / 64).to(here.device))
