"""A small repository behind the hub stand-in, and what the download tests share."""

import json
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from duovolt.convert import download as download_module
from duovolt.convert.standin import HubStandIn

REPO = "org/model"


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.on_advance: Callable[[int], None] = lambda count: None
        self.done = 0
        self.total = 0

    def begin(self, phase: str, total: int, done: int) -> None:
        self.total, self.done = total, done

    def advance(self, count: int) -> None:
        self.done += count
        self.on_advance(count)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def close(self) -> None:
        return


def write_shard(path: Path, count: int, seed: int) -> None:
    """A valid safetensors file of one U8 tensor `t<seed>` with `count` pseudo-random bytes."""
    header = json.dumps({f"t{seed}": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    header += b" " * (-len(header) % 8)
    state = seed * 2654435761 + 12345
    data = bytearray()
    while len(data) < count:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        data += struct.pack("<Q", state)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[:count])


@pytest.fixture
def make_repo(tmp_path: Path) -> Callable[..., Path]:
    """make_repo(name, sizes) -> its folder: shards of odd names, an index without total_size, side files."""

    def make(name: str = REPO, sizes: tuple[int, ...] = (150_000, 70_001, 33)) -> Path:
        folder = tmp_path / "hub" / name
        (folder / "extra").mkdir(parents=True)
        names = ["model.safetensors-00001-of-00002.safetensors", "layers-22.safetensors", "mtp.safetensors"]
        weight_map = {}
        for seed, (file, size) in enumerate(zip(names, sizes, strict=False)):
            write_shard(folder / file, size, seed)
            weight_map[f"t{seed}"] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "foo_config.json").write_bytes(b"\xff\x00 not json")
        (folder / "empty.txt").write_bytes(b"")
        (folder / "extra" / "notes.txt").write_text("a file in a folder")
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02 pickle")
        (folder / "model.Q4.gguf").write_bytes(b"GGUF")
        return folder

    return make


@pytest.fixture
def repo(make_repo: Callable[..., Path]) -> Path:
    return make_repo()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    monkeypatch.setattr(download_module, "FIRST_PAUSE", 0.005)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    (tmp_path / "hub").mkdir(exist_ok=True)
    with HubStandIn(tmp_path / "hub") as standin:
        yield standin


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def expected(repo: Path) -> dict[str, bytes]:
    """Name to content of what a download of `repo` must bring, its record apart."""
    skipped = {".gitattributes", "pytorch_model.bin", "model.Q4.gguf"}
    paths = [path for path in repo.rglob("*") if path.is_file()]
    contents = {path.relative_to(repo).as_posix(): path.read_bytes() for path in paths}
    return {name: content for name, content in contents.items() if name not in skipped}


@pytest.fixture
def tree() -> Callable[[Path], dict[str, bytes]]:
    """tree(directory) -> name to content of every file in it, hidden ones too; links are refused."""

    def read(directory: Path) -> dict[str, bytes]:
        found = {}
        for path in sorted(directory.rglob("*")):
            assert not path.is_symlink(), path
            if path.is_file():
                assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask(), path
                found[path.relative_to(directory).as_posix()] = path.read_bytes()
        return found

    return read


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """command(...) -> argv of `duovolt ...` as a process of its own."""
    return lambda *arguments: [
        sys.executable,
        "-c",
        "from duovolt.cli.main import entry; entry()",
        *map(str, arguments),
    ]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative target never means the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of such a process: no token, no hub settings of the machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DUOVOLT_"))}
    return kept | {"HF_HOME": str(tmp_path / "hf-home")}
