"""The doctor's probes against made-up children, drivers, buses and files."""

import subprocess
import sys
import time
import types

import msgspec
import pytest
import torch

from duovolt.perf.doctor import children
from duovolt.perf.doctor.disk import measure_disk
from duovolt.perf.doctor.facts import Link, Sample, Way
from duovolt.perf.doctor.nvml import Nvml, iommu_type, is_visible
from duovolt.perf.doctor.probes import MachineProbes, nvidia_on_bus, remove_ipc

from .machines import PCIE_V100, change

SECOND = change(PCIE_V100, index=3)


@pytest.fixture
def child(monkeypatch):
    """Puts a script in place of the children's modules."""

    def put(script: str) -> None:
        def start(module, cards, *arguments):
            return subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip

        monkeypatch.setattr(children, "start", start)

    return put


def said(*links: Link) -> str:
    return "".join(f"print({msgspec.json.encode(link).decode()!r}, flush=True);" for link in links)


HOST_ONLY = Link(0, 1, host=Way(True, 4.0, 1e10))


def test_a_link_is_what_the_child_said_last_under_the_cards_own_numbers(child):
    child(said(HOST_ONLY, change(HOST_ONLY, claimed=True, there=Way(True, 2.0))) + "print('noise')")
    link = children.link(PCIE_V100, SECOND)
    assert (link.first, link.second, link.claimed, link.fault) == (0, 3, True, None)
    assert link.host == HOST_ONLY.host and link.there == Way(True, 2.0) and link.back is None


def test_a_child_that_hangs_is_killed_and_what_it_said_is_kept(child):
    child(said(HOST_ONLY) + "import time; time.sleep(60)")
    begin = time.monotonic()
    link = children.link(PCIE_V100, SECOND, seconds=1.0)
    assert time.monotonic() - begin < 10
    assert link.host == HOST_ONLY.host and link.fault == "it hung, and was stopped after 1 s"


def test_a_child_that_dies_is_quoted_by_its_last_line(child):
    child("import sys; sys.stderr.write('trace\\n\\x1b[31mRuntimeError: no device'); sys.exit(7)")
    assert children.link(PCIE_V100, SECOND).fault == "the test ended with code 7: [31mRuntimeError: no device"
    child("")
    assert children.link(PCIE_V100, SECOND).fault == "it said nothing"


def test_the_real_child_says_why_it_cannot():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a card")
    link = children.link(PCIE_V100, SECOND)
    assert link.host is None and link.fault and "\n" not in link.fault


def sample(card, seconds) -> Sample:
    return Sample(seconds, 1380 - card.index, 60)


def test_load_keeps_all_cards_at_work_and_watches_them(child):
    child("import sys, time; print('ready', flush=True); sys.stdin.readline(); time.sleep(float(sys.argv[1]))")
    told: list[float] = []
    load = children.load([PCIE_V100, SECOND], 1.2, sample, told.append)
    assert told == [one.seconds for one in load.samples[0]] and told == sorted(told)
    assert load.fault is None
    assert [{one.clock for one in mine} for mine in load.samples] == [{1380}, {1377}]
    assert all(len(mine) >= 2 for mine in load.samples)


def test_load_ends_when_a_child_cannot_begin_or_dies(child):
    child("import sys; sys.stderr.write('CUDA error'); sys.exit(1)")
    assert children.load([PCIE_V100], 5.0, sample).fault == "GPU 0: the test ended with code 1: CUDA error"
    child("import sys; print('ready', flush=True); sys.stdin.readline(); sys.exit('fell off the bus')")
    assert children.load([PCIE_V100], 0.3, sample).fault == "GPU 0: the test ended with code 1: fell off the bus"


def test_a_card_that_fails_beside_another_is_the_one_that_is_named_at_once(child):
    """Whichever of the two it is; the other is stopped, and not waited for."""
    for failing in (PCIE_V100, SECOND):
        started: list[subprocess.Popen[bytes]] = []
        child(
            "import sys, time; print('ready', flush=True); sys.stdin.readline();"
            "time.sleep(0.7 if sys.argv[2] == 'fails' else 60);"
            "sys.exit('fell off the bus')"
        )
        made = children.start

        def start(module, cards, *arguments, made=made, failing=failing, started=started):
            started.append(made(module, cards, *arguments, "fails" if cards == [failing] else "lives"))
            return started[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "start", start)
            begin = time.monotonic()
            load = children.load([PCIE_V100, SECOND], 60.0, sample)
        assert load.fault == f"GPU {failing.index}: the test ended with code 1: fell off the bus"
        assert time.monotonic() - begin < 15 and all(process.poll() is not None for process in started)
        assert all(load.samples)  # what was seen until then


def test_each_card_at_work_has_a_process_that_sees_it_alone(monkeypatch):
    seen = []

    def popen(arguments, env, **pipes):
        seen.append((arguments[1:], env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]))
        return real([sys.executable, "-c", "print('ready', flush=True); input()"], **pipes)

    real = subprocess.Popen
    monkeypatch.setattr(children.subprocess, "Popen", popen)
    load = children.load([PCIE_V100, SECOND], 0.6, sample)
    module = ["-m", "duovolt.perf.doctor.burn_child", "0.6"]
    assert load.fault is None and seen == [(module, "0", "PCI_BUS_ID"), (module, "3", "PCI_BUS_ID")]


class FakeNvml(types.ModuleType):
    """A driver with two V100s that answers some questions only."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        for name in (
            "NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",
            "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_AGGREGATE_ECC",
            "NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS", "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR",
        ):  # fmt: skip
            setattr(self, name, name)
        self.answers = {
            "nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetName": b"Tesla V100",
            "nvmlDeviceGetCudaComputeCapability": [7, 0], "nvmlDeviceGetNumGpuCores": 4608,
            "nvmlSystemGetDriverVersion": "580.65.06", "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
            "nvmlDeviceGetClockInfo": 1230, "nvmlDeviceGetTemperature": 83, "nvmlDeviceGetUUID": "GPU-abcd",
            "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId=b"00000000:3B:00.0"),
            "nvmlDeviceGetRetiredPages": [1, 2],
        }  # fmt: skip

    def __getattr__(self, name):
        def answer(*arguments):
            if name == "nvmlDeviceGetHandleByIndex":
                return arguments[0]
            if name == "nvmlDeviceGetNvLinkState" and arguments[1] < 6:
                return 1
            if name not in self.__dict__["answers"]:
                raise self.NVMLError("Not Supported")
            return self.__dict__["answers"][name]

        if name.startswith("nvml"):
            return answer
        raise AttributeError(name)


def test_cards_as_the_driver_tells_of_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = Nvml()
    first, second = library.cards()
    assert (first.name, first.capability, first.multiprocessors, first.nvlinks) == ("Tesla V100", (7, 0), 72, 6)
    assert (first.pci, first.retired, first.lanes, first.memory) == ("0000:3b:00.0", 4, None, None)
    assert library.driver() == "580.65.06"
    assert library.sample(second, 1.5) == Sample(1.5, 1230, 83, None, ("its power limit", "thermal"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [card.index for card in Nvml().cards()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = Nvml()
    assert hidden.cards() == [] and hidden.reason == "CUDA_VISIBLE_DEVICES leaves none"


def test_a_driver_that_does_not_answer(monkeypatch):
    class Silent(FakeNvml):
        def nvmlInit(self):
            raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Silent())
    assert Nvml().cards() == [] and "does not answer (Driver Not Loaded)" in (Nvml().reason or "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in (Nvml().reason or "")


def test_a_driver_that_hangs_does_not_hang_the_doctor(monkeypatch):
    class Hanging(FakeNvml):
        def nvmlInit(self):
            time.sleep(20)

    monkeypatch.setitem(sys.modules, "pynvml", Hanging())
    begin = time.monotonic()
    cards, reason = MachineProbes(seconds=0.2).cards()
    assert time.monotonic() - begin < 5 and cards == []
    assert reason == "the driver gives no answer within 0.2 s: see `dmesg`, and restart"


def test_what_a_probe_raises_is_not_lost(monkeypatch):
    monkeypatch.setattr("duovolt.perf.doctor.probes.Nvml", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        MachineProbes().cards()


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [("0,1", True), ("1", True), ("0", False), ("", False), ("GPU-ab", True), ("GPU-ff, 1", True), ("GPU-ff", False)],
)
def test_visible_devices(wanted, seen):
    assert is_visible(1, "GPU-abcd", wanted) is seen


def test_the_bus_shows_cards_that_no_driver_has(tmp_path):
    for address, vendor, device, kind in (
        ("0000:3b:00.0", "0x10de", "0x1df0", "0x030200"),
        ("0000:3b:00.1", "0x10de", "0x10f2", "0x040300"),  # sound
        ("0000:00:1f.0", "0x8086", "0xa1c1", "0x060100"),
    ):
        folder = tmp_path / address
        (folder / "iommu_group").mkdir(parents=True)
        (folder / "iommu_group" / "type").write_text("DMA-FQ\n")
        for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / name).write_text(text + "\n")
    (tmp_path / "0000:ff:00.0").mkdir()
    assert nvidia_on_bus(tmp_path) == ("10de:1df0",)
    assert nvidia_on_bus(tmp_path / "no") == ()
    assert iommu_type("0000:3b:00.0", tmp_path) == "DMA-FQ" and iommu_type("0000:ff:00.0", tmp_path) is None


def test_remove_ipc_is_on_until_a_file_says_no(tmp_path):
    main, more = tmp_path / "logind.conf", tmp_path / "logind.conf.d"
    assert remove_ipc((main, more)) is True
    main.write_text("[Login]\n#RemoveIPC=no\n")
    assert remove_ipc((main, more)) is True
    main.write_text("[Login]\nRemoveIPC=no\n")
    assert remove_ipc((main, more)) is False
    more.mkdir()
    (more / "10.conf").write_text("RemoveIPC = yes\n")
    assert remove_ipc((main, more)) is True


def test_disk_is_measured_within_bounds_and_left_as_it_was(tmp_path):
    disk = measure_disk(tmp_path, most=16 << 20, seconds=2.0)
    assert disk.fault is None and disk.nbytes == 16 << 20 and disk.write > 0 and disk.read > 0 and disk.free > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_disk(tmp_path / "no").fault == "No such file or directory"


def test_this_machine_answers_every_question_but_those_of_cards():
    probes = MachineProbes()
    software, host = probes.software(), probes.host(None)
    assert software.torch and host.cores >= 1 and host.memory > host.memory_available > 0
    if software.nvrtc is not None:
        assert software.nvrtc_reaches_volta == (software.nvrtc < (13, 0))
