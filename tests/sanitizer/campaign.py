"""Everything under every tool, several processes at a time, and what they found."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

AT_ONCE = 12
TOOLS = {"plain": 70, "init": 110, "mem": 80, "race": 115}  # seconds at most, of a process
_FOUND = re.compile(r"Uninitialized|Invalid|Race reported|Potential|hazard detected| note: ")
CONTROLS = {  # what a tool must name, and what it must not
    "init": (("control_read", "rms_norm"), ()),
    "mem": (("control_past", "control_read_past"), ()),
    "race": (("control_race", "control_race_async"), ("control_sound",)),
}
_SUMMARY = re.compile(r"(SUMMARY: (\d+) (?:errors?|hazards?)\b.*)")
GROUPS = {  # parts of a process, of about the same length
    "lists": "lists logs",
    "passes": "passes",
    "drafts": "drafts",
    "ways": "ways",
    "more": "more",
    "linear8": "linear8 wide",
    "between": "elementwise neighbours",
    "caches": "attention delta plain",
    "exchange": "exchange round",
    "v100-linear": "linear8@compute_70 plain@compute_70",
    "v100-more": "more@compute_70",
    "v100-wide": "wide@compute_70 attention@compute_70 delta@compute_70",
    "v100-rest": "exchange round elementwise lists logs drafts passes".replace(" ", "@compute_70 ") + "@compute_70",
}


@dataclass(frozen=True)
class Ended:
    name: str
    log: Path
    status: int  # 124: it ran past its limit

    @property
    def summary(self) -> str:
        """The tool's last line; empty without one."""
        return (_SUMMARY.findall(self.text) or [("", "")])[-1][0]

    @property
    def found(self) -> int:
        """Errors, hazards and warnings."""
        return sum(int(count) for _, count in _SUMMARY.findall(self.text))

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def through(self) -> bool:
        """Whether all of its groups ran."""
        return "through, 0 faults" in self.text

    @property
    def clean(self) -> bool:
        return self.through and not self.found

    def names(self, kernel: str) -> bool:
        """Whether the tool says that something is wrong at this kernel."""
        return re.search(rf"\bat {kernel}(_\d+)?\+0x", self.text) is not None


def sanitizer() -> str:
    """Its path. Raises SystemExit if it is not here."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        raise SystemExit("compute-sanitizer is not on this machine: it is part of the CUDA toolkit.")
    return found


def _options(path: str, tool: str) -> list[str]:
    known = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
    quiet = ["--tool", f"{tool}check", "--report-api-errors", "no", "--show-backtrace", "no", "--print-limit", "10000"]
    more = [["--padding", "512"], ["--destroy-on-device-error", "kernel"]] if tool == "mem" else []
    return quiet + [word for words in more if words[0] in known for word in words]


def _process(tool: str, folder: Path, before: list[str], name: str, parts: str) -> Ended:
    log, record = folder / f"{tool}-{name}.txt", folder / f"{tool}-{name}.rec"
    record.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if tool in ("init", "mem"):  # each tensor in memory of its own
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    limit = ["timeout", "-k", "5", str(TOOLS[tool])]  # of the tool and of what it starts
    own = [sys.executable, "-m", __package__, "--tool", tool, "--record", str(record), *parts.split()]
    with log.open("w") as file:
        done = subprocess.run(
            [*limit, *before, *own], stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        )
    return Ended(name, log, done.returncode)


def _tell(tool: str, ended: list[Ended]) -> None:
    for one in ended:
        print(
            f"{tool}-{one.name}: {one.summary or '-'}, {'all ran' if one.through else 'not all ran'}, status {one.status}"
        )
        lines = one.text.splitlines()
        for number in [number for number, line in enumerate(lines) if _FOUND.search(line)][:4]:
            print(*("    " + line for line in lines[number : number + 2]), sep="\n")


def run(folder: Path) -> int:
    """0 if every part ran under every tool without a finding, and every control was found."""
    path = sanitizer()
    folder.mkdir(parents=True, exist_ok=True)
    bad = False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for tool in TOOLS:
            before = [] if tool == "plain" else [path, *_options(path, tool)]
            if before:
                control = _process(tool, folder, before, f"control-{tool}", f"control-{tool}")
                wrong, sound = CONTROLS[tool]
                missed = [kernel for kernel in wrong if not control.names(kernel)]
                missed += [f"{kernel}, which is sound" for kernel in sound if control.names(kernel)]
                print(
                    f"control of {tool}check: {control.summary or '-'}; missed: {', '.join(missed) or 'none'}",
                    flush=True,
                )
                bad |= bool(missed)
            ended = list(pool.map(partial(_process, tool, folder, before), GROUPS, GROUPS.values()))
            _tell(tool, ended)
            bad |= not all(one.clean and (one.summary or not before) for one in ended)
            records = [str(one) for one in sorted(folder.glob(f"{tool}-*.rec"))]
            if records:
                subprocess.run([sys.executable, "-m", __package__, "--coverage", *records], check=False)
    return 1 if bad else 0
