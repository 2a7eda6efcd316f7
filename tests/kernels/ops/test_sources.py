"""Every source compiles for a V100 without what a V100 lacks or what would let timing into a result."""

import re
import sys

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.kernels import build as builder
from duovolt.kernels import delta_chunks, linear, ops
from duovolt.kernels.ops import cuda_ops

from .support import FORBIDDEN

SOURCES = (
    "attention",
    "attention_plain",
    "attention_prefill",
    "delta",
    "delta_apart",
    "delta_chunks",
    "kvcache",
    "linear_wide",
    "logprobs",
    "norm",
    "rope",
    "round",
    "sampling",
)
SOURCES += ("candidates", "short_lists", "speculation", "staging")


@pytest.mark.parametrize("source", [f"{name}.cu" for name in SOURCES])
def test_ptx_is_for_sm_70_and_holds_nothing_that_volta_lacks(source):
    try:
        ptx = builder.build(source, "compute_70").image.decode()
    except EnvironmentFault as missing:
        pytest.skip(str(missing))
    assert re.search(r"^\.target sm_70$", ptx, re.M)
    assert {what: found[0] for what, found in ((w, re.search(p, ptx)) for w, p in FORBIDDEN.items()) if found} == {}


def test_a_rank_prepares_every_operation():
    """What an operation launches is among the sources that are loaded before the ranks meet."""
    modules = {sys.modules[function.__module__] for function in vars(cuda_ops).values()} | {delta_chunks}
    named = {
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, str) and value.endswith(".cu") and name.isupper()
    }
    assert named <= {*ops.SOURCES, *linear.SOURCES.values()}
