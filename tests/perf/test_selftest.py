"""The self-test without a card, a made-up card's report, and reports that nobody should trust."""

import getpass
import json
import random
import re
import socket
from pathlib import Path

import msgspec
import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.cli.main import main
from duovolt.kernels import linear as linear_ops
from duovolt.kernels.attention import decode_attention_reference
from duovolt.kernels.delta import delta_decode_reference
from duovolt.kernels.norm import gated_rms_norm_reference, rms_norm_reference
from duovolt.kernels.rope import qkv_rope_reference
from duovolt.kernels.tuning import Choice
from duovolt.perf import collective, known_answers, selftest, selftest_slice
from duovolt.perf.curve import READ, Curve, Point, Series, read_curve
from duovolt.perf.device_timing import Timing
from duovolt.perf.doctor.facts import Facts
from duovolt.perf.kernels import Case as LinearCase
from duovolt.perf.known_answers import Answer, answers_of_torch, answers_on, cases
from duovolt.perf.selftest import Exchange, Report, Tuned, read_report, without_places
from duovolt.perf.selftest_report import report_lines
from duovolt.perf.selftest_slice import SliceRow, measure_slice
from duovolt.runtime.engine.cuda.selftest import Case

from .doctor.machines import HOST, LINK, PCIE_V100, SOFTWARE, Machine, change
from .test_curve import MACHINE

CPU = torch.device("cpu")


def points() -> list[Point]:
    found = []
    for power in range(19, 31):
        seconds = 2.5e-6 + (1 << power) / 1058e9
        gbps = (1 << power) / seconds / 1e9
        found.append(Point(1 << power, gbps, gbps * 1.1, 0.01))
    return found


def v100_report() -> Report:
    """As one of a V100 would look; every number is made up."""
    curve = Curve(MACHINE, 1.5, 0.02, 1 << 31, 15, [Series(READ, "sm_70", points())])
    rows = [
        SliceRow("attention in", 4, 36_000_000, 5e-5, 0.01, 4e-5),
        SliceRow("four layers", 4, 530_000_000, 8e-4, 0.01),
        SliceRow("head", 4, 636_000_000, 0.0, 0.0, dry=True),
    ]
    answers = [Answer("linear nvfp4", "sm_70", 1e-4), Answer("norm", "sm_70", 2e-4)]
    cards = [PCIE_V100, change(PCIE_V100, index=1)]
    facts = Facts(cards, None, SOFTWARE, HOST, [LINK])
    return Report(facts, MACHINE, answers, Tuned(Choice(), 12.5), curve, rows, ["a thing: why"],
                  [Exchange("sum 40 KB", {"host": 16.0})])  # fmt: skip


def test_without_a_card_torch_is_tested_and_the_rest_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "report.json"
    assert main(["selftest", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    (families,) = re.findall("answers, cpu: .* families right", out)
    assert families == "answers, cpu: 34 of 34 families right"
    assert families in (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    assert "not done: no card answers to torch" in out and "kernels, curve and slice are not tested" in out
    text = path.read_text()
    for name in (
        socket.gethostname(),
        getpass.getuser(),
        str(Path.home()),
        str(tmp_path),
        str(Path(torch.__file__).parent),
    ):
        assert f'"{name}' not in text and (len(name) < 6 or name not in text), name
    report = read_report(path)
    assert report.machine is None and report.curve is None and len(report.answers) == len(cases())
    assert main(["selftest", "--read", str(path), "--json"]) == 0
    assert capsys.readouterr().out == text


def test_a_torch_that_computes_wrongly_is_found(monkeypatch, tmp_path, capsys):
    stored = json.loads(known_answers.STORED.read_text())
    stored["norm"]["values"][3] *= 1.5
    stored["embedding"]["shape"] = [1]
    del stored["output gate"]
    damaged = tmp_path / "answers.json"
    damaged.write_text(json.dumps(stored))
    monkeypatch.setattr(known_answers, "STORED", damaged)
    found = {answer.family: answer for answer in answers_of_torch()}
    assert {name for name, answer in found.items() if not answer.right} == {"norm", "embedding", "output gate"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--out", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert "WRONG  norm, cpu: relative error" in out and "WRONG  embedding, cpu: shape [3, 128], expected [1]" in out
    assert "WRONG  output gate, cpu: no answer is kept in answers.json" in out


def test_an_answer_is_kept_of_every_family_and_of_no_other():
    """A case that is added goes into the file, too: `python -m duovolt.perf.known_answers`."""
    assert set(json.loads(known_answers.STORED.read_text())) == {case.name for case in cases()}


def test_wrong_unsteady_and_failing_kernels_are_told_apart():
    good = torch.ones(8)
    runs = iter([good, good + 1e-6, good, good])

    def failing(device):
        raise EnvironmentFault("launching norm failed: /usr/lib/x.so is bad")

    chosen = [
        Case("unsteady", lambda device: next(runs), lambda device: good),
        Case("right", lambda device: next(runs), lambda device: good),
        Case("wrong", lambda device: good * 1.1, lambda device: good),
        Case("nan", lambda device: good * float("nan"), lambda device: good),
        Case("failing", failing, lambda device: good),
    ]
    found = {answer.family: answer for answer in answers_on(CPU, "sm_70", chosen)}
    assert [name for name, answer in found.items() if answer.right] == ["right"]
    assert not found["unsteady"].repeatable and found["failing"].fault and found["nan"].error == 1e9
    assert msgspec.json.decode(msgspec.json.encode(list(found.values())), type=list[Answer]) == list(found.values())


def test_a_card_is_tested_step_by_step_and_a_failed_step_is_noted(monkeypatch):
    done = []

    def broken(device, wanted, tell):
        raise EnvironmentFault("out of memory in /home/someone/x.py on GPU-8fecf602-4ed7-7b42-0e9f-a984263d1eef")

    def measured(device, tell):
        done.append("slice")
        return [SliceRow("four layers", 4, 100, 1e-3, 0.0)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(selftest, "read_machine", lambda device: MACHINE)
    monkeypatch.setattr(selftest, "loadable", lambda device: ["sm_90"])
    monkeypatch.setattr(
        selftest, "answers_on", lambda device, arch: [Answer("norm", arch, None, fault="no /tmp/x.cubin")]
    )
    monkeypatch.setattr(
        selftest, "tune", lambda device, tell: type("Trial", (), {"chosen": Choice(), "microseconds": 9.0})
    )
    monkeypatch.setattr(selftest, "measure_curve", broken)
    monkeypatch.setattr(selftest, "measure_slice", measured)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    between = collective.Report([collective.Row("  sum 40 KB", {"ipc": 4.0})], {}, {"nccl": "no code in /usr/lib/x.so"})
    monkeypatch.setattr(collective, "measure", lambda ways: between)
    steps: list[str] = []
    report = selftest.selftest(Machine(), steps.append)
    assert (
        report.exchanges == [Exchange("sum 40 KB", {"ipc": 4.0})]
        and "exchange, nccl: no code in PLACE" in report.missing
    )
    assert done == ["slice"] and report.slice and report.curve is None
    assert report.tuned == Tuned(Choice(), 9.0)
    assert "bandwidth: out of memory in PLACE on ID" in report.missing
    assert any("compute_70: cannot be built here" in one for one in report.missing)
    assert [answer.fault for answer in report.wrong] == ["no PLACE"]
    assert all(card.pci == "" for card in report.facts.cards)
    assert "slice" not in {one.what for one in selftest.selftest(Machine(), steps.append, quick=True).slice}


def test_texts_lose_what_names_a_machine():
    text = "libnvrtc not in /opt/cuda-12/lib64:/home/eve/lib (C:\\Users\\eve) 3/4 of GPU-8FECF602-4ed7-7b42-0e9f-a984263d1eef"
    clean = without_places(text)
    assert "eve" not in clean and "8FEC" not in clean and "3/4" in clean


def test_a_report_is_read_beside_the_prediction_for_its_card(tmp_path, capsys):
    path = tmp_path / "v100.json"
    path.write_bytes(v100_report().encode())
    assert main(["selftest", "--read", str(path)]) == 0
    out = capsys.readouterr().out
    assert "by its own curve: four layers predicted" in out and "measured 800.0 (" in out
    assert "by the card file v100-1107: four layers predicted" in out and "ms a round" in out
    assert "80% of a plain read" in out and "no number: the queue ran dry" in out
    assert "answers, sm_70: 2 of 2 families right, largest relative error 2.0e-04" in out
    assert "not done: a thing: why" in out and "exchange, sum 40 KB: host 16.0 us" in out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("duovolt-selftest-1", "duovolt-selftest-7"),
        ('"seconds": 0.0008', '"seconds": 0'),
        ('"error": 0.0001', '"error": null'),
        ('"tuned"', '"turned"'),
        ("{", "[" * 5000),
        ('"memory_bytes": ', '"memory_bytes": 1' + "0" * 400),
    ],
)
def test_a_damaged_report_is_refused_in_one_line(tmp_path, capsys, old, new):
    text = v100_report().encode().decode()
    assert old in text
    path = tmp_path / "report.json"
    path.write_text(text.replace(old, new, 1))
    assert main(["selftest", "--read", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not a report" in error


def test_hostile_reports_are_read_or_refused_but_never_break_the_reader(tmp_path):
    rng, read = random.Random(7), 0
    values = (0, -1, 1 << 62, 10**400, 1e308, 5e-324, "\x1b[2J\n", "", [], {}, None, True)
    for _ in range(80):
        report = json.loads(v100_report().encode())
        node = report
        while True:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.9:
                node = node[key]
                continue
            node[key] = rng.choice(values)
            break
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report))
        try:
            found = read_report(path)
            assert all(line.isprintable() for line in report_lines(found))
            read += 1
        except InputError:
            continue
    assert 5 < read < 75


def test_command_refuses_places_it_cannot_write_before_it_begins(tmp_path, capsys):
    assert main(["selftest", "--out", str(tmp_path)]) == 2
    assert main(["selftest", "--out", str(tmp_path / "no" / "r.json")]) == 2
    assert main(["selftest", "--read", str(tmp_path / "no")]) == 2
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 26)
    assert main(["selftest", "--read", str(large)]) == 2
    assert "larger than" in capsys.readouterr().err


def test_the_slice_is_a_forward_pass_of_four_layers(monkeypatch):
    """Small shapes and the torch references: every launch fits the next, and the bytes are those of its parts."""
    small = (
        LinearCase("attention in", (("fp8", 1024, 64), ("fp8", 256, 64), ("fp8", 256, 64))),
        LinearCase("delta in", (("fp8", 1024, 64), ("fp8", 512, 64), ("half", 4, 64), ("half", 4, 64))),
        LinearCase("mixer out", (("fp8", 64, 512),), residual=True),
        LinearCase("gate up", (("nvfp4", 96, 64), ("nvfp4", 96, 64)), swiglu=True),
        LinearCase("down", (("nvfp4", 64, 96),), residual=True),
    )
    sizes = {
        "CASES": small,
        "HIDDEN": 64,
        "CONTEXT": 128,
        "Q_HEADS": 2,
        "KV_HEADS": 1,
        "KEY_HEADS": 2,
        "VALUE_HEADS": 4,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(selftest_slice, name, value)
    for name, reference in {
        "linears": linear_ops.linears_reference, "swiglu": linear_ops.swiglu_reference, "rms_norm": rms_norm_reference,
        "gated_rms_norm": gated_rms_norm_reference, "decode_attention": decode_attention_reference,
        "delta_decode": delta_decode_reference, "qkv_rope": qkv_rope_reference,
    }.items():  # fmt: skip
        monkeypatch.setattr(selftest_slice, name, reference)
    monkeypatch.setattr(selftest_slice, "prepare", lambda device: None)
    monkeypatch.setattr(selftest_slice, "copies_of", lambda nbytes, pool: 2)
    monkeypatch.setattr(selftest_slice, "read_seconds", lambda nbytes, device, pool: 1e-6)
    counts = {}

    def once(calls, device):
        counts[len(counts)] = len(calls)
        if not hasattr(calls[0], "func") or calls[0].func.__name__ != "linears":
            calls[0]()
        return Timing(1e-5, 0.0)

    monkeypatch.setattr(selftest_slice, "time_queued", once)
    monkeypatch.setattr(
        selftest_slice, "linear_launches", lambda case, sets, tokens, device: [lambda: None] * len(sets)
    )
    rows = {row.what: row for row in measure_slice(CPU, lambda text: None)}
    assert list(counts.values()) == [2] * (len(rows) - 1) + [1]
    delta, attention = selftest_slice.DeltaLayer(CPU), selftest_slice.AttentionLayer(CPU)
    assert rows["four layers"].nbytes == 3 * delta.nbytes + attention.nbytes
    assert delta.nbytes == sum(weight.nbytes for weight in delta.weights) + 2 * 4 * 128 * 128 * 4
    assert attention.nbytes - sum(weight.nbytes for weight in attention.weights) == 128 * 2 * (256 + 2 * 4)
    assert rows["four layers"].tokens == 4


def test_the_measured_files_of_the_documents_are_read():
    measured = Path(__file__).parents[2] / "docs" / "measured"
    assert read_curve(measured / "h200-curve.json").find(READ).points[-1].gbps == pytest.approx(4519, abs=1)
    report = read_report(measured / "h200-selftest.json")
    assert not report.wrong and any("by the card file h200: four layers" in line for line in report_lines(report))
