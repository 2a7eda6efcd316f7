"""Hostile files, made by hypothesis: readers answer with a value or with one message of ours, soon and in little memory.

The same examples in every run; DUOVOLT_FUZZ=N tries N new ones of each kind instead.
"""

import copy
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.container import read_header
from duovolt.checkpoint.directory import DOWNLOAD_RECORD, INDEX, MANIFEST, Checkpoint
from duovolt.checkpoint.download_record import PENDING, read_record
from duovolt.checkpoint.errors import DuovoltError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.checkpoint.reopen import about_interrupted
from duovolt.checkpoint.sources import read_form
from duovolt.checkpoint.stage import JOURNAL, StageDirectory
from duovolt.convert.fetchlist import weight_files
from duovolt.convert.hub import Listing
from duovolt.convert.recipe import load_recipe, recorded_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.tests.support import maker
from duovolt.verify.proofs import verify

FUZZ = int(os.environ.get("DUOVOLT_FUZZ", "0"))
SLOWEST = 2.0  # seconds of processor time for one example
LARGEST = 64 << 20  # bytes more than before that a file of some kilobytes may cost


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a target: the same examples each time, or FUZZ new ones."""
    return settings(
        max_examples=FUZZ or examples, deadline=None, derandomize=not FUZZ, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def answers(read: Callable[[], object]) -> None:
    """`read` gives a value or raises one of our errors, whose message is one line; within bounds."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
    except DuovoltError as error:
        assert "\n" not in str(error) and len(str(error)) < 20_000
    assert time.process_time() - started < SLOWEST
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LARGEST


NUMBERS = st.one_of(
    st.integers(-2, 300), st.sampled_from([2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]),
    st.floats(allow_nan=False), st.booleans(),
)  # fmt: skip
TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "..", "../x", "/etc/passwd", "a/b", "x\0y", "\ud800", "nvfp4", "U8", "F32", "BF16", "canonical",
                     "v100-fp8", "model.safetensors", "fp8_e4m3/0x0", "fp8_e4m3/99999999999x1", "A" * 5000, "re:(a+)+$"]),
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three places replaced, removed, doubled or emptied."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        parent, key, here = None, None, value
        while isinstance(here, (dict, list)) and here and draw(st.integers(0, 5)):
            keys = sorted(here) if isinstance(here, dict) else range(len(here))
            parent, key = here, draw(st.sampled_from(keys))
            here = parent[key]
        if parent is None:
            continue
        match draw(st.integers(0, 3)):
            case 0:
                parent[key] = draw(JSON)
            case 1:
                del parent[key]
            case 2 if isinstance(parent, dict):
                parent[draw(TEXT)] = here
            case _:
                parent[key] = here * 2 if isinstance(here, (str, list)) else [here]
    return value


@st.composite
def torn(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with runs overwritten, removed, inserted or repeated."""
    found = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found)))
        run = draw(
            st.one_of(st.binary(max_size=12), st.sampled_from([b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"\xff" * 9]))
        )
        end = at + draw(st.sampled_from([0, len(run), 1, 64]))
        found[at:end] = run
    return bytes(found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "converted"
    config = maker.config(num_hidden_layers=1, full_attention_interval=1, vocab_size=64, mtp_num_hidden_layers=0)
    maker.converted(path, config | {"vision_config": None})
    return path


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copied")
    return tmp_path / "copied"


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}


@given(data=st.data())
@fuzz(250)
def test_headers(data: st.DataObject, tmp_path: Path) -> None:
    """Lengths of 2^40, overlaps and holes, duplicate keys, products that overflow: nothing of that size is allocated."""
    path = tmp_path / "x.safetensors"
    header = data.draw(st.one_of(edited(HEADER).map(encoded), torn(encoded(HEADER))))
    length = data.draw(st.one_of(st.just(len(header)), st.integers(0, 2**64 - 1), st.sampled_from([2**40, 2**63])))
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(data.draw(st.sampled_from([24, 0, 23, 25]))))
    answers(lambda: read_header(path))


@given(raw=st.one_of(torn(b'{"weight_map": {"a": "a.safetensors"}}'), edited({"metadata": {}, "weight_map": {
    "a": "a.safetensors", "b": "b.safetensors"}}).map(encoded)))  # fmt: skip
@fuzz(150)
def test_indices(raw: bytes, copied: Path) -> None:
    """On disk, and as a hub sends it: no path leads out of the directory."""
    (copied / INDEX).write_bytes(raw)
    answers(lambda: Checkpoint.open(copied))
    listing = Listing("org/x", "main", "0" * 40, None, dict.fromkeys(["a.safetensors", "config.json"]))
    answers(lambda: weight_files(listing, raw))


@given(data=st.data())
@fuzz(100)
def test_manifests(data: st.DataObject, copied: Path, made: Path) -> None:
    """Read, and given to `verify`, which must not take it for sound."""
    whole = (made / MANIFEST).read_bytes()
    raw = data.draw(st.one_of(edited(json.loads(whole)).map(encoded), torn(whole)))
    (copied / MANIFEST).write_bytes(raw)
    answers(lambda: read_manifest(copied))
    if raw != whole:
        answers(lambda: _refused(copied))


def _refused(directory: Path) -> None:
    assert not verify(converted=directory).ok


@given(data=st.data())
@fuzz(120)
def test_configurations(data: st.DataObject, copied: Path) -> None:
    """No layer is counted, no tensor listed, before the numbers are known to make sense."""
    config = data.draw(edited(maker.config()))
    answers(lambda: _inventory(config))
    quantised = data.draw(edited({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
                                  "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}))  # fmt: skip
    (copied / "config.json").write_bytes(encoded(maker.config() | {"quantization_config": quantised}))
    answers(lambda: read_form(Checkpoint.open(copied)))


def _inventory(config: Any) -> None:
    assert len(inventory(ModelConfig.from_dict(config, "config.json"))) < 100_000


RECIPE = {"name": "x", "layout": "v100", "max_shard_bytes": 9, "rules": [
    {"encoding": "nvfp4", "group": "text", "roles": ["mlp.up_proj"], "names": []}], "quantiser": "default"}  # fmt: skip
TOML = b'name = "x"\nlayout = "v100"\nmax_shard_bytes = 9\n[[rules]]\nroles = ["mlp.up_proj"]\nencoding = "nvfp4"\n'


@given(recorded=edited(RECIPE), raw=torn(TOML))
@fuzz(150)
def test_recipes(recorded: Any, raw: bytes, tmp_path: Path) -> None:
    config = ModelConfig.from_dict(maker.config())
    with suppress(msgspec.DecodeError):  # as a manifest or a journal gives it
        recorded = msgspec.json.decode(encoded(recorded))
        answers(lambda: recorded_recipe(recorded, "manifest").encodings(config))
    (tmp_path / "r.toml").write_bytes(raw)
    answers(lambda: load_recipe(str(tmp_path / "r.toml")).encodings(config))


RECORD = {"format_version": 1, "repo": "a/b", "revision": "main", "commit": "0" * 40, "files": {
    "config.json": {"size": 3, "digest_kind": "git-sha1", "digest": "0" * 40, "etag": "x"}}}  # fmt: skip


@given(raw=st.one_of(edited(RECORD).map(encoded), torn(encoded(RECORD))))
@fuzz(150)
def test_download_records(raw: bytes, tmp_path: Path) -> None:
    """A record names files that are hashed and moved: none of them may lie elsewhere."""
    for name in (DOWNLOAD_RECORD, PENDING):
        (tmp_path / name).write_bytes(raw)
    for pending in (False, True):
        answers(lambda pending=pending: _within(tmp_path, pending))
    answers(lambda: verify(downloaded=tmp_path))


def _within(directory: Path, pending: bool) -> None:
    record = read_record(directory, pending)
    for name in record.files if record is not None else ():
        assert (directory / name).resolve().is_relative_to(directory.resolve())


@given(raw=torn(b'{"identity":"x","about":{"recipe":{}}}\n{"name":"a","record":{"size":1,"digest":"0"},"note":{}}\n'))
@fuzz(150)
def test_journals(raw: bytes, tmp_path: Path) -> None:
    directory = tmp_path / "stage"
    directory.mkdir(exist_ok=True)
    (directory / JOURNAL).write_bytes(raw)
    answers(lambda: about_interrupted(directory))
    answers(lambda: _resumed(directory))


def _resumed(directory: Path) -> None:
    with StageDirectory(directory, "x") as stage:
        assert stage.resume("a") is None
