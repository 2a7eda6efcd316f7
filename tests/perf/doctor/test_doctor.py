"""The doctor's lines and exit codes on made-up machines."""

import json
import sys

import pytest

from duovolt.cli import doctor
from duovolt.cli.main import main
from duovolt.perf.doctor.facts import Disk, Link, Load, Way, examine
from duovolt.perf.doctor.judge import exit_code, judge

from .machines import GB, HOST, HOST_WAY, LINK, PCIE_V100, SOFTWARE, SXM2_V100, Machine, change, samples


def found(machine: Machine, **options):
    return judge(examine(machine, **options))


def line(findings, about: str, word: str):
    """The one finding about something whose text or remedy holds a word."""
    fit = [one for one in findings if one.about == about and word in f"{one.text} {one.remedy}"]
    assert len(fit) == 1, [f"{one.grade} {one.about}: {one.text} -> {one.remedy}" for one in findings]
    return fit[0]


def test_two_good_cards_without_nvlink():
    findings = found(Machine())
    assert exit_code(findings) == 0
    assert [one.about for one in findings if one.grade != "good"] == ["NVLink"]
    for index in (0, 1):
        assert line(findings, f"GPU {index}", "1107 MHz").text.startswith(
            "memory at 1107 MHz, 1134 GB/s on paper: the PCIe"
        )
        assert "72 multiprocessors" in line(findings, f"GPU {index}", "Tesla").text
        assert line(findings, f"GPU {index}", "x16").text == "PCIe 3 x16 (generation 1 while it rests)"
    assert line(findings, "driver", "580.65.06").grade == "good"
    assert "holds code for sm_70" in line(findings, "torch", "2.7.1").text
    assert "2.2 us a round trip, 10.9 GB/s; the other way 2.3" in line(findings, "GPU 0 - GPU 1", "stores into").text


def test_the_other_memory_clock_and_nvlink():
    findings = found(Machine(SXM2_V100, SXM2_V100))
    assert all(one.grade == "good" for one in findings)
    assert "memory at 877 MHz, 898 GB/s on paper: the SXM2 form" in line(findings, "GPU 1", "877").text
    assert line(findings, "NVLink", "links up").text == "6, 6 links up"


def test_a_machine_without_a_card_is_told_what_works_there():
    software = change(SOFTWARE, driver=None, torch="2.7.1+cpu", torch_cuda=None, torch_arches=[], nccl=None)
    reason = "the NVIDIA driver does not answer"
    findings = found(Machine(reason=reason, host=change(HOST, pci_cards=()), software=software))
    assert exit_code(findings) == 0
    assert "convert, shard, verify" in line(findings, "cards", "none").remedy
    assert not [one for one in findings if one.about in ("driver", "NCCL", "pair", "NVLink", "IOMMU")]


@pytest.mark.parametrize(
    ("driver", "grade", "words"),
    [
        ("590.44.01", "broken", "does not drive Volta any more, 580 was the last"),
        (None, "broken", "no NVIDIA driver is loaded"),
        ("470.256.02", "broken", "too old for CUDA 12"),
        ("570.133.20", "limited", "branch 580 starts kernels sooner"),
    ],
)
def test_a_driver_that_cannot_or_could_be_better(driver, grade, words):
    reason = "the driver sees no card" if grade == "broken" else None
    findings = found(Machine(software=change(SOFTWARE, driver=driver), reason=reason))
    assert line(findings, "driver", words).grade == grade
    assert "580" in line(findings, "driver", words).remedy
    assert exit_code(findings) == int(grade == "broken")
    if reason:
        assert (
            "2 NVIDIA on the bus (10de:1df0, 10de:1df0), but the driver sees no card"
            in line(findings, "cards", "bus").text
        )


def test_a_new_driver_is_fine_for_a_newer_card():
    newer = change(
        PCIE_V100, name="NVIDIA H200", capability=(9, 0), multiprocessors=132, memory_mhz=3201, bus_bits=6144
    )
    findings = found(
        Machine(newer, software=change(SOFTWARE, driver="590.44.01"), host=change(HOST, pci_cards=("10de:2335",)))
    )
    assert exit_code(findings) == 0 and line(findings, "driver", "590").text == "590.44.01"
    assert "newer than the V100" in line(findings, "GPU 0", "H200").text
    assert "compiles for these cards" in line(found(Machine(newer, software=change(SOFTWARE, nvrtc_reaches_volta=False))),
                                              "NVRTC", "12.6").text  # fmt: skip
    assert "4917 GB/s on paper" in line(findings, "GPU 0", "3201 MHz").text


@pytest.mark.parametrize(
    ("software", "words"),
    [
        ({"torch": "2.9.0", "torch_cuda": "12.8", "torch_arches": ["sm_75", "sm_80", "sm_90", "compute_120"]},
         "torch 2.9.0 (CUDA 12.8) holds no code for sm_70, only for sm_75, sm_80, sm_90, compute_120"),
        ({"torch": "2.9.0+cpu", "torch_cuda": None, "torch_arches": []}, "torch 2.9.0+cpu is a build without CUDA"),
    ],
)  # fmt: skip
def test_torch_without_code_for_the_card(software, words):
    findings = found(Machine(software=change(SOFTWARE, **software)))
    wrong = line(findings, "torch", words)
    assert wrong.grade == "broken" and wrong.remedy == 'pip install "duovolt[cuda,serve]" torch==2.7.1'
    assert exit_code(findings) == 1


@pytest.mark.parametrize(
    ("version", "arches", "grade", "words"),
    [
        ((2, 28, 3), ["sm_75", "sm_90"], "limited", "NCCL 2.28.3 holds no code for sm_70, only for sm_75, sm_90"),
        ((2, 28, 3), ["sm_70", "sm_90"], "good", "2.28.3, code for sm_70, sm_90"),
        ((2, 28, 3), None, "limited", "NCCL 2.28.3 may hold no code for sm_70"),
        ((2, 21, 5), None, "good", "2.21.5"),
        ((2, 26, 2), ["sm_70"], "good", "reported of it: illegal memory access"),
        (None, None, "limited", "torch has no NCCL"),
    ],
)
def test_nccl_is_judged_by_what_its_file_holds(version, arches, grade, words):
    findings = found(Machine(software=change(SOFTWARE, nccl=version, nccl_arches=arches)))
    assert line(findings, "NCCL", words).grade == grade
    assert exit_code(findings) == 0  # the ranks can meet without it


@pytest.mark.parametrize(
    ("software", "grade", "words"),
    [
        (
            {"nvrtc": (13, 0), "nvrtc_reaches_volta": False},
            "broken",
            "13.0 does not compile for a V100, CUDA 13 dropped Volta",
        ),
        ({"nvrtc": None, "nvrtc_fault": "no library"}, "broken", "the CUDA compiler is missing (no library)"),
        ({"nvrtc": None, "nvrtc_fault": "no library", "prebuilt": True}, "limited", "missing"),
        ({"nvrtc": (12, 2)}, "limited", "older than those tested"),
    ],
)
def test_nvrtc(software, grade, words):
    assert line(found(Machine(software=change(SOFTWARE, **software))), "NVRTC", words).grade == grade


@pytest.mark.parametrize("kind", ["DMA", "DMA-FQ"])
def test_an_iommu_that_translates(kind):
    cards = [change(PCIE_V100, iommu=kind)] * 2
    findings = found(Machine(*cards))
    assert line(findings, "IOMMU", f"group type {kind}").grade == "limited"
    assert "iommu=pt" in line(findings, "IOMMU", kind).remedy
    linked = found(Machine(*[change(SXM2_V100, iommu=kind)] * 2))
    assert line(linked, "IOMMU", "NVLink does not pass through").grade == "good"
    assert line(found(Machine(*[change(PCIE_V100, iommu="identity")] * 2)), "IOMMU", "identity").grade == "good"


@pytest.mark.parametrize(
    ("link", "grade", "words"),
    [
        (change(LINK, there=Way(False)), "limited", "claims peer access, but stores do not arrive (there)"),
        (change(LINK, there=Way(False), back=Way(False)), "limited", "stores do not arrive (there and back)"),
        (change(LINK, back=Way(True, 49000.0)), "limited", "slower than host memory"),
        (Link(0, 1, True, None, None, HOST_WAY, "it hung, and was stopped after 60 s"), "limited", "it hung"),
        (Link(0, 1, False, None, None, HOST_WAY), "limited", "offers no peer access"),
        (Link(0, 1, None, None, None, Way(False)), "broken", "pinned host memory do not arrive (wrong words)"),
        (
            Link(0, 1, fault="the test ended with code -11: x"),
            "broken",
            "do not arrive (the test ended with code -11: x)",
        ),
    ],
)
def test_what_lies_between_two_cards(link, grade, words):
    findings = found(Machine(link=link))
    assert line(findings, "GPU 0 - GPU 1", words).grade == grade
    assert exit_code(findings) == int(grade == "broken")


def test_one_card_and_unlike_cards():
    alone = found(Machine(PCIE_V100))
    assert line(alone, "pair", "one card").grade == "good"
    assert not [one for one in alone if one.about in ("NCCL", "NVLink", "IOMMU")]
    mixed = found(Machine(PCIE_V100, SXM2_V100))
    assert line(mixed, "pair", "memory clock (1107 and 877)").grade == "broken" and exit_code(mixed) == 1
    three = found(Machine(PCIE_V100, PCIE_V100, SXM2_V100))
    assert line(three, "pair", "GPU 1 and GPU 2 differ").grade == "limited" and exit_code(three) == 0
    assert line(three, "pair", "GPU 0 and GPU 1 are alike").grade == "good"
    assert line(mixed, "NVLink", "none up on GPU 0").grade == "limited"
    foreign = found(Machine(PCIE_V100, change(PCIE_V100, name="T4", capability=(7, 5))))
    assert line(foreign, "pair", "capability ((7, 0) and (7, 5))").grade == "broken" and exit_code(foreign) == 1
    small = found(Machine(change(PCIE_V100, memory=16 * GB, memory_free=16 * GB)))
    assert (
        line(small, "GPU 0", "leave little room").grade == "limited"
        and line(small, "pair", "one card").grade == "limited"
    )
    old = found(Machine(change(PCIE_V100, name="Tesla P100", capability=(6, 0))))
    assert line(old, "GPU 0", "6.0 is too old").grade == "broken"


@pytest.mark.parametrize(
    ("fields", "grade", "words"),
    [
        ({"uncorrected": 3}, "broken", "3 memory errors"),
        ({"retired": 5}, "limited", "5 memory pages"),
        ({"lanes": 4}, "limited", "PCIe 3 x4 of x16"),
        ({"memory_mhz_application": 810}, "limited", "set to 810 MHz"),
        ({"memory_free": 2 * GB, "processes": 1}, "limited", "taken by 1 processes"),
        ({"temperature": 84}, "limited", "84 C without work"),
        ({"memory_mhz": None}, "limited", "memory clock is not told"),
        ({"capability": None}, "limited", "capability is not told"),
    ],
)
def test_a_card_that_one_should_not_buy_or_should_set_right(fields, grade, words):
    findings = found(Machine(change(PCIE_V100, **fields)))
    assert line(findings, "GPU 0", words).grade == grade
    assert line(findings, "GPU 0", words).remedy
    assert exit_code(findings) == int(grade == "broken")


@pytest.mark.parametrize(
    ("clocks", "slowed", "grade", "words"),
    [
        ([1380] * 9, (), "good", "2 cards at work for 60 s: 1380 MHz at the start, 1380 at the end, up to 82 C"),
        ([1400, 1400, 1380, 1300, 1200, 1150, 1100, 1050, 1000], ("thermal",), "limited", "throttles by heat"),
        (
            [1380, 1380, 1300, 1200, 1200, 1200, 1200, 1200, 1200],
            ("its power limit",),
            "good",
            "by its power limit",
        ),
        (
            [1380, 1380, 1300, 900, 900, 900, 900, 900, 900],
            ("its power limit",),
            "limited",
            "look at cables",
        ),
    ],
)
def test_cards_that_get_hot_together(clocks, slowed, grade, words):
    load = Load(60.0, [samples(clocks, 82, slowed), samples([1380] * 9)])
    findings = found(Machine(load=load), load_seconds=60.0)
    assert line(findings, "GPU 0", words).grade == grade
    assert line(findings, "GPU 1", "at work for").grade == "good"


def test_a_load_that_ends_early_and_one_that_cannot_be_watched():
    findings = found(Machine(load=Load(60.0, [[], []], "GPU 1: it fell off the bus")), load_seconds=60.0)
    assert line(findings, "load", "fell off").grade == "broken" and exit_code(findings) == 1
    assert line(findings, "GPU 0", "no clocks could be read").grade == "limited"


@pytest.mark.parametrize(
    ("host", "about", "grade", "words"),
    [
        ({"memory_available": 2 * GB}, "memory", "limited", "2.1 of 68.7 GB"),
        ({"shm_free": 1 << 20}, "/dev/shm", "broken", "--shm-size"),
        ({"shm": None}, "/dev/shm", "broken", "there is none"),
        ({"remove_ipc": True}, "RemoveIPC", "good", "no name by then"),
    ],
)
def test_the_machine_around_the_cards(host, about, grade, words):
    assert line(found(Machine(host=change(HOST, **host))), about, words).grade == grade


def test_disk(tmp_path):
    assert line(found(Machine(), folder=tmp_path), "disk", "1900 MB/s").grade == "good"
    slow = line(found(Machine(disk=Disk(GB, 90e6, 100e6, GB)), folder=tmp_path), "disk", "100 MB/s")
    assert slow.grade == "limited" and "take 4 minutes" in slow.remedy
    assert line(found(Machine(disk=Disk(fault="Read-only file system"))), "disk", "Read-only").grade == "broken"


def test_many_cards_are_tested_as_neighbours():
    assert [(one.first, one.second) for one in examine(Machine(*[SXM2_V100] * 8)).links] == [
        (i, i + 1) for i in range(7)
    ]
    assert len(examine(Machine(*[SXM2_V100] * 4)).links) == 6
    assert examine(Machine(), links=False).links == []


def test_command_prints_lines_json_and_a_verdict(monkeypatch, capsys, tmp_path):
    broken = Machine(software=change(SOFTWARE, driver="590.44.01"))
    monkeypatch.setattr(doctor, "probes", lambda: broken)
    assert main(["doctor", "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "broken   driver" in out and "-> install 580 and hold it there" in out
    assert out.splitlines()[-1].endswith("1 broken")
    assert main(["doctor", "--quiet"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["doctor", "--json", "--load", "1"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["cards"][1]["memory_mhz"] == 1107 and told["facts"]["load"]["seconds"] == 1
    assert {one["grade"] for one in told["findings"]} == {"good", "limited", "broken"}
    monkeypatch.setattr(doctor, "probes", Machine)
    assert main(["doctor", "--quiet"]) == 0 and capsys.readouterr().out == ""


def test_a_load_shows_how_far_it_is_to_a_person_only(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probes", Machine)
    for terminal, words, shows in (
        (True, [], True),
        (False, [], False),
        (True, ["--quiet"], False),
        (True, ["--json"], False),
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=terminal: shown, raising=False)
        assert main(["doctor", "--load", "8", *words]) == 0
        said = capsys.readouterr()
        assert ("load: 4 of 8 s" in said.err and "load: 8 of 8 s" in said.err) == shows, said.err
        assert "of 8 s |" not in said.out and (shows or not said.err)


def test_command_refuses_what_it_cannot_do(capsys, tmp_path):
    assert main(["doctor", "--load", "-1"]) == 2
    assert main(["doctor", "--load", "nan"]) == 2
    assert main(["doctor", "--folder", str(tmp_path / "no")]) == 2
    assert "not a directory" in capsys.readouterr().err


def test_a_load_without_a_card_is_told():
    """Asked for by name, so that its absence is no line less but one more, and the exit code says so."""
    findings = found(Machine(reason="no NVIDIA driver is loaded"), load_seconds=5.0)
    assert line(findings, "load", "no card to keep at work").grade == "broken" and exit_code(findings) == 1
    assert not [
        one for one in found(Machine(reason="no NVIDIA driver is loaded"), load_seconds=0.0) if one.about == "load"
    ]
