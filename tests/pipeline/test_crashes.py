"""Every stage, stopped at its writes: killed, out of disk, read-only, interrupted; then run again to the same bytes.

A sample of the writes in every run of the tests, all of them with `-m slow`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest

from duovolt.checkpoint.directory import DOWNLOAD_RECORD, INDEX, MANIFEST
from duovolt.checkpoint.lock import LOCK
from duovolt.cli.main import main
from duovolt.convert import download as download_module
from duovolt.convert.download import download
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import Recipe, load_recipe, recorded_recipe
from duovolt.convert.standin import HubStandIn
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.walk import Outcome, Walker

REPO = "org/tiny"
ERRORS = ["EIO", "EROFS", "EACCES", "EDQUOT"]
STAGES = [
    "download",
    "convert",
    "shard",
    "dequantize",
    "repair ranks",
    "repair converted",
    "repair download",
    "quarantine",
]
# What the stage writes last: where it stands, the rest must be right.
LAST = {"download": DOWNLOAD_RECORD, "convert": MANIFEST, "shard": MANIFEST, "dequantize": INDEX}


@dataclass(frozen=True)
class Stage:
    """A stage as a command line; `@` is its own directory, `template` what lies in it before (for repairs)."""

    command: list[str]
    template: Path | None = None
    code: int = 0


def recipe() -> Recipe:
    return recorded_recipe(load_recipe("v100").resolved() | {"max_shard_bytes": 60_000}, "test")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, HubStandIn]]:
    """A hub, and under `sound` a download of it, its conversion and two ranks."""
    base = tmp_path_factory.mktemp("crashes")
    config = maker.config(num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=0, vocab_size=64)
    config["vision_config"] = None
    (base / "hub" / "org").mkdir(parents=True)
    maker.plain_source(base / "hub" / REPO, config, max_shard_bytes=200_000)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DUOVOLT_"))}
    patch = pytest.MonkeyPatch()
    patch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(base / "no-token"))
    patch.setattr(download_module, "FIRST_PAUSE", 0.005)
    for name in os.environ.keys() - environment.keys():
        patch.delenv(name)
    with HubStandIn(base / "hub") as hub:
        download(REPO, base / "sound" / "source", endpoint=hub.url)
        convert(base / "sound" / "source", base / "sound" / "converted", recipe(), 2, lambda count: None)
        shard(base / "sound" / "converted", base / "sound" / "ranks", 2)
        yield base, hub
    patch.undo()


def damaged(base: Path, name: str, *files: str) -> Path:
    """A copy of the sound directories with a bit flipped in each of `files`."""
    copy = base / f"damaged {name}"
    if not copy.exists():
        shutil.copytree(base / "sound", copy)
        for file in files:
            raw = bytearray((copy / file).read_bytes())
            raw[-1] ^= 1
            (copy / file).write_bytes(raw)
    return copy


def stage_of(name: str, base: Path, hub: HubStandIn) -> Stage:
    sound = base / "sound"
    shards = sorted(path.name for path in (sound / "converted").glob("*.safetensors"))
    cut = sorted(path.name for path in (sound / "ranks" / "rank-0-of-2").glob("*.safetensors"))
    first = sorted(path.name for path in (sound / "source").glob("*.safetensors"))[0]
    if name == "download":
        return Stage(["download", REPO, "@", "--endpoint", hub.url, "--workers", "1", "--quiet"])
    if name == "convert":
        (base / "recipe.toml").write_text(toml(recipe()))
        return Stage(["convert", str(sound / "source"), "@", "--recipe", str(base / "recipe.toml")])
    if name == "shard":
        return Stage(["shard", str(sound / "converted"), "@", "--tp", "2"])
    if name == "dequantize":
        return Stage(["dequantize", str(sound / "ranks"), "@", "--dtype", "bfloat16"])
    if name == "repair ranks":
        template = damaged(base, name, f"ranks/rank-0-of-2/{cut[0]}", f"ranks/rank-1-of-2/{cut[-1]}")
        return Stage(["verify", "--converted", "@/converted", "--ranks", "@/ranks", "--repair"], template)
    if name == "repair converted":
        template = damaged(base, name, f"converted/{shards[0]}", f"converted/{shards[-1]}")
        return Stage(["verify", "--source", "@/source", "--converted", "@/converted", "--repair"], template)
    if name == "repair download":
        template = damaged(base, name, f"source/{first}", "source/config.json")
        return Stage(["verify", "--downloaded", "@/source", "--repair", "--quiet", "--endpoint", hub.url], template)
    template = damaged(base, name, f"source/{first}", "source/config.json")
    return Stage(["verify", "--downloaded", "@/source", "--quarantine"], template, code=1)


def toml(recipe: Recipe) -> str:
    """A recipe as a file of the user's."""
    lines = [f'name = "{recipe.name}"', f'layout = "{recipe.layout}"', f"max_shard_bytes = {recipe.max_shard_bytes}"]
    for rule in recipe.rules:
        lines += ["[[rules]]", f'group = "{rule.group}"', f"roles = {json.dumps(rule.roles)}"]
        lines += [f'encoding = "{rule.encoding}"']
    return "\n".join(lines) + "\n"


def contents(directory: Path) -> dict[str, bytes]:
    """Every file, a lock apart: that of a dead process means nothing."""
    files = [p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != LOCK]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def final(found: dict[str, bytes]) -> dict[str, bytes]:
    """Files under their final names."""
    return {name: raw for name, raw in found.items() if not any(part.startswith(".") for part in Path(name).parts)}


def check_left(
    name: str, left: dict[str, bytes], whole: dict[str, bytes], before: dict[str, bytes], where: str
) -> None:
    """No half file under its final name; what says `finished` stands only where the rest is right."""
    for file, raw in final(left).items():
        assert raw in (whole.get(file), before.get(file)), f"{where}: {file}"
    if name in LAST:
        for file in [file for file in final(left) if Path(file).name == LAST[name]]:
            folder = str(Path(file).parent)
            mine = [f for f in whole if str(Path(f).parent).startswith("" if folder == "." else folder)]
            assert all(left.get(f) == whole[f] for f in mine), f"{where}: finished, but not whole"


def check_later_stages_refuse(name: str, place: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without its last file is called unfinished, or at least no checkpoint."""
    if name == "convert" and not (place / MANIFEST).exists():
        assert main(["shard", str(place), str(base / "never"), "--tp", "2"]) == 2
    elif name == "shard" and place.exists():
        for rank in place.iterdir():
            if not (rank / MANIFEST).exists():
                assert main(["verify", "--ranks", str(rank)]) == 2
                assert main(["dequantize", str(place), str(base / "never")]) in (1, 2)
    elif name == "dequantize" and not (place / INDEX).exists():
        assert main(["inspect", str(place)]) == 2
    assert not (base / "never").exists()
    capsys.readouterr()


@dataclass(frozen=True)
class Walked:
    """A stage, and its unbroken run, which lies in `root`/whole and has `count` writes."""

    name: str
    stage: Stage
    base: Path
    root: Path
    count: int
    walker: Walker

    def check(self, doors: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Outcome]:
        """Run the stage through the doors, look at what it left, run it again, and compare with the unbroken run.

        doors: what happens and at which write, such as `killed:7` or `ENOSPC:3`.
        """
        whole = contents(self.root / "whole")
        before = {} if self.stage.template is None else contents(self.stage.template)
        settings = {label: _door(*label.split(":")) for label in doors}
        outcomes = self.walker.walk(self.root, self.stage.command, settings, self.stage.template)
        for label in doors:
            place = self.root / label
            if place.exists():
                check_left(self.name, contents(place), whole, before, f"{self.name}, {label}")
                check_later_stages_refuse(self.name, place, self.base, capsys)
        again = self.walker.walk(self.root, self.stage.command, {label: {} for label in doors})
        for label in doors:
            assert again[label].code == self.stage.code, f"{self.name}, {label}: {again[label].err}"
            assert contents(self.root / label) == whole, f"{self.name}, {label}"
            shutil.rmtree(self.root / label)
        return outcomes

    def run(self, numbers: dict[str, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
        """`numbers` of writes at which each kind of thing happens: `killed`, `SIGINT`, or an error's name."""
        doors = [f"{kind}:{n}" for kind, found in numbers.items() for n in found]
        for label, outcome in self.check(doors, capsys).items():
            kind, told = label.split(":")[0], f"{self.name}, {label}: {outcome}"
            last = (outcome.err.splitlines() or [""])[-1]
            if kind == "killed":
                assert outcome.code == -9, told
            elif kind == "SIGINT":
                assert outcome.code == 130 and last.startswith("duovolt: interrupted"), told
            else:
                wanted = "disk is full" if kind in ("ENOSPC", "EDQUOT") else os.strerror(getattr(errno, kind))
                assert outcome.code == 3 and wanted in last, told
            messages = [line for line in outcome.err.splitlines() if line.startswith("duovolt: ")]
            assert messages == ([] if kind == "killed" else [last]) and "Traceback" not in outcome.err, told


def _door(kind: str, number: str) -> dict[str, str]:
    return {"DUOVOLT_STOP_AT_WRITE": number} if kind == "killed" else {"DUOVOLT_FAIL_AT_WRITE": f"{number}:{kind}"}


@pytest.fixture(scope="module")
def walker(base: tuple[Path, HubStandIn]) -> Iterator[Walker]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "DUOVOLT_"))}
    with Walker(kept | {"HF_HOME": str(base[0] / "hf-home")}) as walker:
        yield walker


@pytest.fixture
def walked(request: pytest.FixtureRequest, base: tuple[Path, HubStandIn], walker: Walker, tmp_path: Path) -> Walked:
    stage = stage_of(request.param, *base)
    count = walker.count_writes(tmp_path, stage.command, stage.template, stage.code)
    return Walked(request.param, stage, base[0], tmp_path, count, walker)


@pytest.mark.parametrize("walked", STAGES, indirect=True)
def test_stopped_at_some_writes(walked: Walked, capsys: pytest.CaptureFixture[str]) -> None:
    """O02, D04: kill -9, Ctrl-C (exit code 130), a disk that is full, broken, read-only or forbidden (3, one line)."""
    count = walked.count
    numbers = {"killed": [1, count // 2, count - 1, count], "SIGINT": [count // 3], "ENOSPC": [3 * count // 4]}
    # Over the stages every error occurs, each at another place.
    turn = STAGES.index(walked.name)
    numbers |= {ERRORS[turn % len(ERRORS)]: [1 + count * (turn + 1) // (len(STAGES) + 1)]}
    walked.run({kind: sorted(set(found)) for kind, found in numbers.items()}, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("walked", STAGES, indirect=True)
def test_stopped_at_every_write(walked: Walked, capsys: pytest.CaptureFixture[str]) -> None:
    """O02, D04 without sampling."""
    for first in range(1, walked.count + 1, 20):
        numbers = range(first, min(first + 20, walked.count + 1))
        errors = {e: [n for n in numbers if n % len(ERRORS) == i] for i, e in enumerate(ERRORS)}
        walked.run({"killed": list(numbers), "SIGINT": list(numbers)} | errors, capsys)
