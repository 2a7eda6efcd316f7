"""`verify --repair` and `--quarantine`: only what is damaged is written again, and the result is an undamaged run's."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest

from duovolt.checkpoint.container import read_header
from duovolt.checkpoint.directory import DOWNLOAD_RECORD, MANIFEST, QUARANTINE
from duovolt.checkpoint.manifest import read_manifest
from duovolt.checkpoint.stage import AtomicFile
from duovolt.cli.main import main
from duovolt.convert import download as download_module
from duovolt.convert.download import download
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import Recipe, load_recipe, recorded_recipe
from duovolt.convert.standin import HubStandIn
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.damage import edit_manifest, edit_tensor, refit
from duovolt.tests.support.journey import Journey

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"
REPO = "org/tiny"
NORM = "model.language_model.norm.weight"


@dataclass(frozen=True)
class Repaired(Journey):
    """A download, its conversion and the ranks of that."""

    def contents(self) -> dict[str, bytes]:
        """Every file, name to bytes; what was moved aside apart."""
        return {
            str(path.relative_to(self.base)): path.read_bytes()
            for path in sorted(self.base.rglob("*"))
            if path.is_file() and QUARANTINE not in path.parts
        }

    def stamps(self) -> dict[str, int]:
        """Inode of every file: a file that is written again has another."""
        return {str(path.relative_to(self.base)): path.stat().st_ino for path in self.base.rglob("*") if path.is_file()}


def small_shards() -> Recipe:
    return recorded_recipe(load_recipe("v100").resolved() | {"max_shard_bytes": 120_000}, "test")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repaired, HubStandIn]]:
    base = tmp_path_factory.mktemp("repair")
    shutil.copytree(FIXTURE, base / "hub" / REPO)
    kept = {name: os.environ.pop(name, None) for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")}
    token, pause = huggingface_hub.constants.HF_TOKEN_PATH, download_module.FIRST_PAUSE
    huggingface_hub.constants.HF_TOKEN_PATH, download_module.FIRST_PAUSE = str(base / "no-token"), 0.005
    with HubStandIn(base / "hub") as hub:
        journey = Repaired(base / "journey")
        download(REPO, journey.source, endpoint=hub.url)
        convert(journey.source, journey.converted, small_shards(), 2, lambda count: None)
        shard(journey.converted, journey.ranks, 2)
        yield journey, hub
    huggingface_hub.constants.HF_TOKEN_PATH, download_module.FIRST_PAUSE = token, pause
    os.environ.update({name: value for name, value in kept.items() if value is not None})


@pytest.fixture
def journey(pristine: tuple[Repaired, HubStandIn], tmp_path: Path) -> Repaired:
    shutil.copytree(pristine[0].base, tmp_path / "journey")
    return Repaired(tmp_path / "journey")


@pytest.fixture
def repair(journey: Repaired, pristine: tuple[Repaired, HubStandIn]) -> Callable[..., int]:
    """Run `verify --repair` on everything, or with other arguments."""

    def run(*options: str, downloaded: bool = False, **places: Path | None) -> int:
        found = {"source": journey.source, "converted": journey.converted, "ranks": journey.ranks} | places
        arguments = [word for name, path in found.items() if path is not None for word in (f"--{name}", str(path))]
        if downloaded:
            arguments += ["--downloaded", str(journey.source), "--endpoint", pristine[1].url]
        return main(["verify", *arguments, "--repair", *options])

    return run


def flip(path: Path, position: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def test_nothing_to_repair(journey: Repaired, repair: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    before = journey.stamps()
    assert repair(downloaded=True) == 0 and journey.stamps() == before
    out = capsys.readouterr().out
    assert "repaired" not in out and "proved  downloaded: bytes of files: " in out


DAMAGES: dict[str, tuple[Callable[[Repaired], object], int | None]] = {
    "a bit of a rank": (lambda j: flip(shards(j.rank(1))[1]), 2),
    "a rank's header": (lambda j: flip(shards(j.rank(0))[0], 20), 2),
    "a rank's file cut off": (lambda j: os.truncate(shards(j.rank(0))[2], 100), 2),
    "a rank's file missing": (lambda j: shards(j.rank(0))[1].unlink(), 2),
    "a rank's side file": (lambda j: flip(j.rank(1) / "config.json", 3), 2),
    "a rank's index": (lambda j: flip(j.rank(1) / "model.safetensors.index.json"), 2),
    "a rank's manifest": (lambda j: flip(j.rank(0) / MANIFEST, 900), None),
    "a rank's manifest missing": (lambda j: (j.rank(0) / MANIFEST).unlink(), None),
    "a rank missing": (lambda j: shutil.rmtree(j.rank(1)), None),
    "a rank given twice": (lambda j: (shutil.rmtree(j.rank(1)), shutil.copytree(j.rank(0), j.rank(1))), None),
    "a bit of a rank that its digests fit": (
        lambda j: (edit_tensor(j.rank(1), "lm_head.weight", lambda d: d.__setitem__(7, d[7] ^ 4)), refit(j.rank(1))), 2,
    ),
    "a replicated tensor that its digests fit": (
        lambda j: (edit_tensor(j.rank(0), NORM, lambda d: d.__setitem__(0, d[0] ^ 1)), refit(j.rank(0))), None,
    ),
    "a rank's record of a split": (
        lambda j: edit_manifest(
            j.rank(1), lambda m: m["tensors"]["lm_head.weight"]["split"].__setitem__("ranges", [(0, 128)])
        ), None,
    ),
    "a converted bit": (lambda j: flip(shards(j.converted)[3]), 2),
    "a converted file missing": (lambda j: shards(j.converted)[0].unlink(), 2),
    "a converted side file": (lambda j: flip(j.converted / "config.json", 3), 2),
    "a converted manifest": (lambda j: flip(j.converted / MANIFEST, 500), None),
    "a converted manifest missing": (lambda j: (j.converted / MANIFEST).unlink(), None),
    "a converted bit that its digests fit": (
        lambda j: (edit_tensor(j.converted, NORM, lambda d: d.__setitem__(0, d[0] ^ 1)), refit(j.converted)), None,
    ),
    "a converted header and two bits of the ranks": (
        lambda j: (flip(shards(j.converted)[1], 30), flip(shards(j.rank(0))[0]), flip(shards(j.rank(1))[0])), 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_the_bytes_are_an_undamaged_runs(name: str, journey: Repaired, repair: Callable[..., int]) -> None:
    """Only the damaged files and the manifest are written (`rewritten` files; None: more than that may be)."""
    wanted, stamps = journey.contents(), journey.stamps()
    damage, rewritten = DAMAGES[name]
    damage(journey)
    assert journey.contents() != wanted
    options = [] if "converted manifest" not in name else ["--recipe", str(recipe_file(journey))]
    assert repair(*options) == 0
    assert journey.contents() == wanted
    if rewritten is not None:
        changed = [path for path, inode in journey.stamps().items() if stamps.get(path) != inode]
        # The index of a converted directory is always put anew.
        assert len([path for path in changed if path != "converted/model.safetensors.index.json"]) <= rewritten


def recipe_file(journey: Repaired) -> Path:
    path = journey.base.parent / "small.toml"
    rules = "".join(
        f'[[rules]]\ngroup = "{r["group"]}"\nroles = {json.dumps(r["roles"])}\nencoding = "{r["encoding"]}"\n'
        for r in json.loads(json.dumps(small_shards().resolved()))["rules"]
    )
    path.write_text(f'name = "v100"\nlayout = "v100"\nmax_shard_bytes = 120000\n{rules}')
    return path


def test_a_download_is_repaired_from_its_hub(
    journey: Repaired, repair: Callable[..., int], pristine: tuple[Repaired, HubStandIn]
) -> None:
    """Two damaged files are fetched, at the pinned commit, though the branch has moved on; then the rest is proved."""
    wanted, (_, hub) = journey.contents(), pristine
    flip(journey.source / "config.json", 2)
    first = sorted(journey.source.glob("*.safetensors"))[0]
    os.truncate(first, 77)
    hub.log.clear()
    assert repair(downloaded=True) == 0
    assert journey.contents() == wanted
    fetched = {served.name for served in hub.log if served.body_bytes and served.name != "api"}
    assert fetched == {"config.json", first.name}


def test_quarantine_and_the_next_download(
    journey: Repaired, pristine: tuple[Repaired, HubStandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad files are kept under a name of their own, and the next download fetches them and nothing else."""
    wanted, (_, hub) = journey.contents(), pristine
    first = sorted(journey.source.glob("*.safetensors"))[0]
    flip(first)
    bad = first.read_bytes()
    assert main(["verify", "--downloaded", str(journey.source)]) == 1
    assert first.exists() and "sha256" in capsys.readouterr().out
    for number in (1, 2):
        assert main(["verify", "--downloaded", str(journey.source), "--quarantine"]) == 1
        aside = journey.source / QUARANTINE / f"{first.name}.bad-{number}"
        assert aside.read_bytes() == bad and not first.exists()
        assert main(["convert", str(journey.source), str(journey.base / "x")]) == 2
        assert first.name in capsys.readouterr().err and not (journey.base / "x").exists()
        hub.log.clear()
        download(REPO, journey.source, endpoint=hub.url)
        assert {s.name for s in hub.log if s.body_bytes and s.name != "api"} == {first.name}
        assert journey.contents() == wanted
        first.write_bytes(bad)


def test_a_side_file_that_was_moved_aside_is_missed(journey: Repaired, capsys: pytest.CaptureFixture[str]) -> None:
    """D05: no later stage takes what is left for the whole."""
    name = next(n for n in read_manifest(journey.converted).files if n.endswith(".json") and "index" not in n)
    flip(journey.source / name, 2)
    assert main(["verify", "--downloaded", str(journey.source), "--quarantine"]) == 1
    assert main(["plan", str(journey.source)]) == 2
    assert name in capsys.readouterr().err


def test_strange_files_are_moved_aside_only_when_asked(journey: Repaired, repair: Callable[..., int]) -> None:
    wanted = journey.contents()
    (journey.rank(0) / "model.safetensors").write_bytes(b"mine")
    victim = shards(journey.converted)[0]
    victim.unlink()
    victim.mkdir()
    assert repair() == 2 and victim.is_dir()
    assert repair("--quarantine") == 0
    assert journey.contents() == wanted
    assert (journey.rank(0) / QUARANTINE / "model.safetensors.bad-1").read_bytes() == b"mine"
    assert (journey.converted / QUARANTINE / f"{victim.name}.bad-1").is_dir()


@pytest.mark.parametrize(
    ("damage", "left_out", "code", "words"),
    [
        (lambda j: flip(shards(j.rank(0))[0]), ["source", "converted"], 2, "give --converted"),
        (lambda j: flip(shards(j.converted)[0]), ["source"], 2, "give --source"),
        (lambda j: (j.converted / MANIFEST).unlink(), ["source"], 2, "give --source"),
        (lambda j: (j.source / DOWNLOAD_RECORD).unlink(), ["converted", "ranks", "source"], 2, "no finished download"),
        (lambda j: flip(j.source / "config.json", 2), [], 2, "lies in the source"),
        (lambda j: flip(sorted(j.source.glob("*.safetensors"))[0]), [], 2, "would write"),
    ],
)
def test_what_cannot_be_repaired_is_said(
    damage: Callable[[Repaired], object], left_out: list[str], code: int, words: str,
    journey: Repaired, repair: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    damage(journey)
    before = journey.contents()
    assert repair(downloaded=words == "no finished download", **dict.fromkeys(left_out)) == code
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert journey.contents() == before


def test_a_rank_of_another_conversion_is_not_overwritten(
    journey: Repaired, repair: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker.converted(tmp_path / "other", maker.config())
    shutil.rmtree(journey.rank(1))
    shard(tmp_path / "other", journey.ranks, 2, 1)
    before = journey.contents()
    assert repair() == 2
    assert "would write" in capsys.readouterr().err and journey.contents() == before


def test_ranks_of_two_widths_are_not_sorted_out(
    journey: Repaired, repair: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shard(journey.converted, journey.ranks, 1)
    assert repair() == 2 and "not the ranks of one split" in capsys.readouterr().err


def test_the_report_lists_findings(journey: Repaired, tmp_path: Path) -> None:
    """As data: stage, file, tensor and what it can be made from."""
    edit_tensor(journey.rank(1), "lm_head.weight", lambda data: data.__setitem__(0, data[0] ^ 1))
    report = tmp_path / "report.json"
    arguments = ["--converted", str(journey.converted), "--ranks", str(journey.ranks), "--json", str(report)]
    assert main(["verify", *arguments, "--quiet"]) == 1
    (finding,) = json.loads(report.read_text())["findings"]
    assert finding["directory"] == str(journey.rank(1)) and finding["stage"] == "ranks"
    assert finding["file"] == read_manifest(journey.rank(1)).tensors["lm_head.weight"].file
    assert finding["fixable_from"] == "converted" and not finding["extra"]
    assert main(["verify", *arguments, "--quiet", "--repair"]) == 0
    told = json.loads(report.read_text())
    assert told["ok"] and told["findings"] == [] and len(told["done"]) == 1


def test_a_changed_source_is_no_reason_to_give_up_a_sound_conversion(
    journey: Repaired, repair: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = journey.stamps()
    flip(shards(journey.source)[0], 100_000)
    assert repair() == 2 and journey.stamps() == before
    error = capsys.readouterr().err
    assert "has changed since" in error and "remove it only if" in error


@pytest.mark.parametrize("name", ["rank-01-of-02", "rank-7-of-2", "rank-0-of-0", "rank-0-of-999"])
def test_folders_that_shard_never_names_start_no_new_ranks(
    name: str, journey: Repaired, repair: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    journey.rank(1).rename(journey.ranks / name)
    assert repair() == 2
    assert sorted(path.name for path in journey.ranks.iterdir()) == sorted(["rank-0-of-2", name])
    assert name in capsys.readouterr().err


def test_the_rank_that_one_stands_in(journey: Repaired, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = journey.contents()
    flip(shards(journey.rank(0))[0])
    monkeypatch.chdir(journey.rank(0))
    assert main(["verify", "--converted", str(journey.converted), "--ranks", ".", "--repair"]) == 0
    assert journey.contents() == whole


@pytest.mark.parametrize("lost", [False, True])
def test_a_draft_head_chosen_by_a_list_needs_its_recipe(
    lost: bool, journey: Repaired, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.txt").write_text("".join(f"{number}\n" for number in range(40, 90)))
    keys = 'draft_head = 64\ndraft_head_tokens = "list.txt"\n'
    built_in = Path(__file__).parents[2] / "convert" / "recipes" / "v100.toml"
    (tmp_path / "r.toml").write_text(keys + built_in.read_text())
    source, target = str(Path(__file__).parents[2] / "tiny" / "checkpoint"), tmp_path / "c"
    assert main(["convert", source, str(target), "--recipe", str(tmp_path / "r.toml"), "--quiet"]) == 0
    whole = {path.name: path.read_bytes() for path in target.iterdir()}
    flip(shards(target)[0])
    command = ["verify", "--source", source, "--converted", str(target), "--repair"]
    assert main(command) == 2
    assert "name the recipe" in capsys.readouterr().err
    if lost:
        (target / MANIFEST).unlink()
    assert main([*command, "--recipe", str(tmp_path / "r.toml")]) == 0
    assert {path.name: path.read_bytes() for path in target.iterdir()} == whole


def test_a_record_that_names_too_little_proves_nothing(journey: Repaired, capsys: pytest.CaptureFixture[str]) -> None:
    path = journey.source / DOWNLOAD_RECORD
    record = json.loads(path.read_text())
    files, shard = record["files"], shards(journey.source)[0].name
    path.write_text(json.dumps(record | {"files": {name: files[name] for name in files if name != shard}}))
    assert main(["verify", "--downloaded", str(journey.source)]) == 1
    assert f"{shard}: named by the index, but not by the record" in capsys.readouterr().out
    path.write_text(json.dumps(record | {"files": {}}))
    assert main(["verify", "--downloaded", str(journey.source)]) == 2
    assert "names no files" in capsys.readouterr().err


def test_a_report_lies_where_it_harms_nothing(journey: Repaired, capsys: pytest.CaptureFixture[str]) -> None:
    before = journey.contents()
    source, converted, ranks = map(str, (journey.source, journey.converted, journey.ranks))
    commands = {
        "verify": ["verify", "--source", source, "--converted", converted, "--ranks", ranks],
        "convert": ["convert", source, converted],
        "shard": ["shard", converted, ranks, "--tp", "2"],
    }
    for name, command in commands.items():
        for place in (journey.base, journey.converted / MANIFEST, journey.base / "no" / "r.json"):
            assert main([*command, "--json", str(place)]) == 2, (name, place)
            assert f"--json {place}: " in capsys.readouterr().err
    assert main([*commands["verify"], "--json", str(journey.rank(0) / "report.json")]) == 2
    assert journey.contents() == before


@pytest.mark.parametrize("stage", ["converted", "ranks"])
def test_only_the_damaged_tensors_of_a_file_are_written(
    journey: Repaired, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = journey.converted if stage == "converted" else journey.ranks / "rank-1-of-2"
    before = journey.contents()
    tensors = read_manifest(directory).tensors
    name = next(
        name for name, record in tensors.items() if sum(other.file == record.file for other in tensors.values()) > 4
    )
    path = directory / tensors[name].file
    entry = read_header(path).tensors[name]
    raw = bytearray(path.read_bytes())
    raw[entry.end - 1] ^= 4
    path.write_bytes(raw)
    written: dict[str, int] = {}
    sound = AtomicFile.write

    def counted(file: AtomicFile, data: bytes | memoryview) -> None:
        written[file.path.name] = written.get(file.path.name, 0) + len(data)
        sound(file, data)

    monkeypatch.setattr(AtomicFile, "write", counted)
    places = ["--source", str(journey.source), "--converted", str(journey.converted), "--ranks", str(journey.ranks)]
    assert main(["verify", *places, "--repair", "--quiet"]) == 0
    header = min(other.begin for other in read_header(path).tensors.values())
    shards = {file: count for file, count in written.items() if file.endswith(".safetensors")}
    assert shards == {path.name: header + entry.nbytes}
    assert journey.contents() == before
