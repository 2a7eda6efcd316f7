"""A card that is not there: every operation checks its arguments and takes the way that it takes on an H200; what it launches is
checked against the compiled kernels and written down."""

import torch

from duovolt.kernels import checks, plain, prefill, tuning, wide
from duovolt.kernels import linear as lin
from duovolt.kernels import module as mod
from duovolt.kernels.launching import Parameters
from duovolt.kernels.tuning import Choice

from .launching import NATIVE, names_in, record


class Fake:
    """A module that checks what it is asked to launch."""

    def __init__(self, source, arch):
        self.source, self.arch = source, arch
        self.clusters = self.overlaps = mod.overlaps(arch)
        self.names = names_in(source, arch)

    @property
    def overlapping(self):
        return self.overlaps and mod._overlapping.get()

    def launch(self, name, blocks, threads, arguments, shared_bytes=0, overlap=False, cluster=1):
        assert name in self.names, f"{self.source} {self.arch} has no {name}"
        grid = (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1)[:3]
        assert all(1 <= n <= 65535 or (i == 0 and n > 0) for i, n in enumerate(grid)), (name, grid)
        assert 1 <= threads <= 1024 and shared_bytes <= 232448 and (cluster == 1 or grid[0] % cluster == 0)
        assert cluster == 1 or self.clusters
        Parameters(arguments)
        record(self.source, name, self.arch)

    def attribute(self, name, attribute):
        assert name in self.names, name
        return 0


def pretend():
    """For the rest of this process."""
    known = {}

    def load(source, device, defines=()):
        assert not defines
        arch = mod._forced_arch.get() or NATIVE
        return known.setdefault((source, arch), Fake(source, arch))

    for place in (mod, checks, lin, plain):
        place.load = load
    checks.module_on = lambda source, device: load(source, 0)
    for place in (lin, prefill):
        place._check_device = lambda x, weights: lin.check_addresses(x, weights)
    for place in (tuning, lin, prefill, wide):
        place.multiprocessors = lambda device: 132
    for place in (mod, lin):
        place.block_shared_bytes = lambda device: 232448
        place.multiprocessor_shared_bytes = lambda device: 233472
    tuning._cached_share = lambda device: 1 << 20
    tuning._stored = lambda device: Choice()
    torch.cuda.synchronize = lambda *a: None
