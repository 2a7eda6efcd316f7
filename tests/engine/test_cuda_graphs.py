"""What runs in a graph runs as it is written first, and for ever where a capture fails; here without a card."""

import contextlib
import gc

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.kernels import module
from duovolt.runtime.engine.cuda.graphs import Graphs


class Graph:
    """A graph that only notes what happens to it."""

    notes: list[str] = []
    fault: Exception | None = None

    def capture_begin(self, **_: object) -> None:
        self.notes.append("begin")
        if self.fault is not None:
            raise self.fault

    def capture_end(self) -> None:
        self.notes.append("end")

    def replay(self) -> None:
        self.notes.append("replay")


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Graph, "notes", [])
    return Graph.notes


def test_the_first_run_is_plain_the_second_is_captured_the_third_replayed(notes):
    graphs = Graphs(torch.device("cuda"), enabled=True)
    for _ in range(3):
        graphs.run("a", lambda: notes.append("work"))
    graphs.run("b", lambda: notes.append("other"))
    assert notes == ["work", "begin", "work", "end", "replay", "replay", "other"] and len(graphs) == 1


@pytest.mark.parametrize("fault", [RuntimeError("not permitted\nat all"), EnvironmentFault("launching x failed")])
def test_after_a_capture_that_fails_everything_runs_as_it_is_written(notes, monkeypatch, fault):
    monkeypatch.setattr(Graph, "fault", fault)
    graphs = Graphs(torch.device("cuda"), enabled=True, overlap=False)
    for _ in range(3):
        graphs.run("a", lambda: notes.append("work"))
    assert notes == ["work", "begin", "work", "work"] and not graphs.enabled
    assert graphs.fault == str(fault).splitlines()[0]


@pytest.mark.parametrize("fault", [None, RuntimeError("not permitted")])
def test_no_garbage_is_collected_within_a_capture(notes, monkeypatch, fault):
    """Among it may be graphs, and destroying one breaks the capture."""
    graphs, seen = Graphs(torch.device("cuda"), enabled=True, overlap=False), []

    def work(outside=lambda step: step()) -> None:
        seen.append(gc.isenabled())
        outside(lambda: seen.append(gc.isenabled()))
        if fault is not None and len(seen) > 2:
            raise fault

    for run in (graphs.run_parts, graphs.run):
        seen.clear()
        run(run, work)
        with contextlib.suppress(RuntimeError):  # then it runs as it is written, and fails again
            run(run, work)
        assert seen[:3] == [True, True, False] and gc.isenabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_launches_overlap_within_a_capture_alone(notes, wanted):
    graphs = Graphs(torch.device("cuda"), enabled=True, overlap=wanted)
    seen = []
    for _ in range(3):
        graphs.run("a", lambda: seen.append(module._overlapping.get()))
    assert seen == [False, wanted]


def test_rounds_are_captured_again_in_turn_where_that_is_asked_for(notes):
    graphs = Graphs(torch.device("cuda"), enabled=True)
    seen = []
    for _ in range(2):
        graphs.run("a", lambda: seen.append(module._overlapping.get()))
    with graphs.in_turn():
        for _ in range(2):
            graphs.run("a", lambda: seen.append(module._overlapping.get()))
    graphs.run("a", lambda: seen.append(module._overlapping.get()))
    assert seen == [False, True, False] and len(graphs) == 2 and graphs.overlap


def test_where_overlapping_launches_cannot_be_captured_they_are_captured_one_after_the_other(notes):
    def work() -> None:
        notes.append("overlapping" if module._overlapping.get() else "work")
        if module._overlapping.get():
            raise EnvironmentFault("launching x failed: operation not supported")

    graphs = Graphs(torch.device("cuda"), enabled=True)
    for _ in range(3):
        graphs.run("a", work)
    assert notes == ["work", "begin", "overlapping", "end", "begin", "work", "end", "replay", "replay"]
    assert graphs.enabled and not graphs.overlap and graphs.fault is None


def test_there_are_no_graphs_on_a_cpu_or_where_they_are_off(notes):
    for graphs in (Graphs(torch.device("cpu"), enabled=True), Graphs(torch.device("cuda"), enabled=False)):
        for _ in range(3):
            graphs.run("a", lambda: None)
        assert len(graphs) == 0
    assert notes == []


def test_steps_outside_of_graphs_run_each_time_in_their_place(notes):
    graphs = Graphs(torch.device("cuda"), enabled=True)

    def work(outside) -> None:
        notes.append("work")
        outside(lambda: notes.append("step"))
        notes.append("rest")

    for _ in range(3):
        graphs.run_parts("a", work)
    replayed = ["replay", "step", "replay"]
    captured = ["begin", "work", "end", "begin", "rest", "end"]
    assert notes == ["work", "step", "rest", *captured, *replayed, *replayed] and len(graphs) == 1
    notes.clear()
    graphs.run_parts("b", work, known=True)
    assert notes == [*captured, *replayed]


@pytest.mark.parametrize("when", ["first", "between"])
def test_where_a_part_cannot_be_captured_all_of_that_runs_as_it_is_written(notes, monkeypatch, when):
    """Nothing has run by then, so that nothing runs twice; rounds keep their graphs; the first error is the one that is told."""
    graphs, ran = Graphs(torch.device("cuda"), enabled=True), []
    for _ in range(2):
        graphs.run("round", lambda: None)

    def work(outside) -> None:
        if when == "between" and len(ran) == 1:
            monkeypatch.setattr(Graph, "fault", RuntimeError("not permitted"))
        outside(lambda: ran.append("step"))

    graphs.run_parts("a", work)
    if when == "first":
        monkeypatch.setattr(Graph, "fault", RuntimeError("not permitted"))
    notes.clear()
    for _ in range(2):
        graphs.run_parts("a", work)
    assert notes == (["begin"] if when == "first" else ["begin", "end", "begin"])
    assert ran == ["step"] * 3 and graphs.parts_fault == "not permitted"
    assert graphs.enabled and graphs.fault is None and len(graphs) == 1
    notes.clear()
    graphs.run("round", lambda: None)
    assert notes == ["replay"]
