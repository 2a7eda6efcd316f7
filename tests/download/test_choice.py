"""Which files: the index decides, globs may only narrow the rest, and names from a server are suspect."""

import json

import pytest

from duovolt.checkpoint.download_record import unusable_name
from duovolt.checkpoint.errors import InputError
from duovolt.convert.download import download

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def rewrite_index(repo, change):
    index = json.loads((repo / INDEX).read_text())
    change(index)
    (repo / INDEX).write_text(json.dumps(index))


def test_include_that_leaves_a_shard_out_is_refused_by_name(hub, repo, tmp_path):
    """D06: the index decides what is needed, whatever its files are called."""
    with pytest.raises(InputError, match=r"--include leaves out layers-22\.safetensors, mtp\.safetensors,"):
        download(REPO, tmp_path / "dst", endpoint=hub.url, include=["model.*", "*.json"])
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("include", "missing"), [(["*.safetensors"], INDEX), (["*.safetensors", INDEX], "config.json")]
)
def test_index_and_config_cannot_be_left_out(hub, repo, tmp_path, include, missing):
    with pytest.raises(InputError, match=f"--include leaves out {missing}"):
        download(REPO, tmp_path / "dst", endpoint=hub.url, include=include)


def test_include_narrows_the_side_files(hub, repo, tmp_path, tree):
    report = download(REPO, tmp_path / "dst", endpoint=hub.url, include=["*.safetensors", "*.json"])
    shards = {SHARD, "layers-22.safetensors", "mtp.safetensors"}
    assert set(tree(tmp_path / "dst")) == {*shards, INDEX, "config.json", "foo_config.json", "duovolt-download.json"}
    assert report.skipped["chat_template.jinja"] == "not asked for by --include"


def test_include_can_ask_for_another_form_by_name(hub, repo, tmp_path):
    download(REPO, tmp_path / "dst", endpoint=hub.url, include=["*.safetensors", "*.json", "*.gguf"])
    assert (tmp_path / "dst/model.Q4.gguf").read_bytes() == b"GGUF"


def test_include_that_matches_nothing_is_a_typing_error(hub, repo, tmp_path):
    with pytest.raises(InputError, match=r"--include '\*\.jnija': matches no file"):
        download(REPO, tmp_path / "dst", endpoint=hub.url, include=["*", "*.jnija"])


def test_shard_that_the_index_does_not_name_is_left(hub, repo, tmp_path):
    (repo / "model.safetensors").write_bytes(b"a stray second set")
    report = download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert "model.safetensors" in report.skipped and not (tmp_path / "dst/model.safetensors").exists()


def test_shard_that_the_repository_lacks_is_named(hub, repo, tmp_path):
    (repo / "mtp.safetensors").unlink()
    with pytest.raises(InputError, match=r"index names 1 file\(s\) that revision .* does not hold: mtp\.safetensors"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors", "a\\b", 3]
)
def test_index_with_a_path_for_a_shard_is_refused(hub, repo, tmp_path, name):
    rewrite_index(repo, lambda index: index["weight_map"].update(evil=name))
    with pytest.raises(InputError, match="not a plain file name"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b"[]", "no weight_map"),
        (b'{"weight_map"', "not valid JSON"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "not valid JSON|twice|duplicate"),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', "not a safetensors file"),
    ],
)
def test_broken_index_is_one_message(hub, repo, tmp_path, content, message):
    (repo / INDEX).write_bytes(content)
    with pytest.raises(InputError, match=message):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_repository_without_safetensors_says_so(hub, repo, tmp_path):
    for path in [*repo.glob("*.safetensors"), repo / INDEX]:
        path.unlink()
    with pytest.raises(InputError, match="not a safetensors checkpoint"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


HOSTILE = [
    "../evil",
    "a/../../evil",
    "/etc/evil",
    "a\\..\\evil",
    "C:evil",
    "a//b",
    "./a",
    "a/",
    "..",
    ".",
    "",
    "a\nb",
    "a\0b",
    None,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_in_the_listing_stops_everything(hub, repo, tmp_path, name):
    hub.edit_listing = lambda listing: (
        listing | {"siblings": [*listing["siblings"], {"rfilename": name, "size": 4, "blobId": "0" * 40}]}
    )
    with pytest.raises(InputError):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert not (tmp_path / "dst").exists() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["a", "a/b.txt", "..a", "a..b", "\u00fc \u6587.json", "-x", "~", "a b"])
def test_plain_names_pass(name):
    assert unusable_name(name) is None


@pytest.mark.parametrize("name", ["duovolt-download.json", ".x.safetensors.part", ".x.part.json", ".duovolt.lock"])
def test_our_own_names_are_not_taken_from_a_server(hub, repo, tmp_path, name):
    (repo / name).write_text("foreign")
    report = download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert report.skipped[name] == "a name that duovolt keeps for itself"
    assert name == "duovolt-download.json" or not (tmp_path / "dst" / name).exists()


def test_name_listed_twice_is_refused(hub, repo, tmp_path):
    hub.edit_listing = lambda listing: listing | {"siblings": listing["siblings"] * 2}
    with pytest.raises(InputError, match="twice"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_link_in_the_place_of_a_folder_is_refused(hub, repo, tmp_path):
    outside, dst = tmp_path / "outside", tmp_path / "dst"
    outside.mkdir()
    dst.mkdir()
    (dst / "extra").symlink_to(outside)
    with pytest.raises(InputError, match="extra: a link"):
        download(REPO, dst, endpoint=hub.url)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("target", ["right content", "dangling", "precious"])
def test_link_in_the_place_of_a_file_becomes_the_content(hub, expected, tmp_path, tree, recorder, target):
    dst, outside = tmp_path / "dst", tmp_path / "outside"
    dst.mkdir()
    content = {"right content": expected[SHARD], "dangling": None, "precious": b"precious"}[target]
    if content is not None:
        outside.write_bytes(content)
    (dst / SHARD).symlink_to(outside)
    download(REPO, dst, endpoint=hub.url, progress=recorder)
    assert tree(dst)[SHARD] == expected[SHARD]
    assert (outside.read_bytes() if outside.exists() else None) == content
    assert f"{SHARD}: a link, not a file; fetched anew" in recorder.notices


def test_directory_in_the_place_of_a_file_is_refused(hub, repo, tmp_path):
    (tmp_path / "dst" / SHARD).mkdir(parents=True)
    with pytest.raises(InputError, match="a directory, where the repository has a file"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_converted_directory_is_no_target(hub, repo, tmp_path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/duovolt.json").write_text("{}")
    with pytest.raises(InputError, match="holds a converted checkpoint"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_stranger_in_the_directory_is_left_and_mentioned(hub, repo, tmp_path, recorder):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/mine.txt").write_text("mine")
    download(REPO, tmp_path / "dst", endpoint=hub.url, progress=recorder)
    assert (tmp_path / "dst/mine.txt").read_text() == "mine"
    assert "not part of this download, left alone: mine.txt" in recorder.notices
