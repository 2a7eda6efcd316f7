"""On a card: the children's real work, and timing that neither host nor cache explains."""

import subprocess
import sys

import msgspec
import pytest
import torch

from duovolt.kernels.module import load
from duovolt.perf.curve_measure import refusal
from duovolt.perf.device_timing import PROBE, _replay, node_cost, time_queued
from duovolt.perf.doctor import children
from duovolt.perf.doctor.facts import Link
from duovolt.perf.doctor.probes import MachineProbes
from duovolt.perf.machine import read_machine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_stores_between_two_streams_of_one_card_arrive():
    module = f"{children.__name__.rpartition('.')[0]}.link_child"
    done = subprocess.run([sys.executable, "-m", module, "0", "0"], capture_output=True, timeout=100)
    link = msgspec.json.decode(done.stdout.splitlines()[-1], type=Link)
    print(link)
    assert link.fault is None, link.fault
    for way in (link.host, link.there, link.back):
        assert way is not None and way.right and way.round_trip_us is not None and 0.1 < way.round_trip_us < 100
        assert way.rate is not None and way.rate > 1e9


def test_the_card_is_seen_kept_at_work_and_watched():
    probes = MachineProbes()
    cards, reason = probes.cards()
    assert reason is None and cards[0].capability == torch.cuda.get_device_capability(0)
    if cards[0].memory_mhz is None:
        pytest.skip("nvidia-ml-py is not installed")
    assert cards[0].multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    load = probes.load(cards[:1], 3.0)
    print(load)
    assert load.fault is None and len(load.samples[0]) >= 4
    assert all(sample.clock for sample in load.samples[0])


def test_a_node_costs_about_a_microsecond_and_a_starved_queue_is_noticed():
    device = torch.device("cuda", 0)
    node = node_cost(device)
    print(node)
    assert not node.dry and 1e-7 < node.seconds < 2e-5
    data = torch.zeros(1 << 26, device=device)
    timing = time_queued([lambda: data.add_(1.0)] * 4, device)
    assert not timing.dry
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(2000):
            data[:32].add_(1.0)
    with torch.cuda.stream(stream):
        held = [_replay(graph, stream, load(PROBE, 0).launch, hold, None)[1] for hold in (20_000, 20_000, 0, 0)]
    assert held == [False, False, True, True]  # without the gate the card begins before the graph is queued
    machine = read_machine(device)
    print(machine, machine.peak_gbps)
    assert refusal(2 * data.nbytes, timing, 1 << 40, machine) is None
    small = torch.zeros(1 << 18, device=device)  # 1 MB: lives in the cache
    cached = time_queued([lambda: small.sum()] * 64, device)
    assert "pool too small" in (refusal(small.nbytes, cached, small.nbytes, machine) or "")
