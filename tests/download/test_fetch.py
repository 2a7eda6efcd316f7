"""A whole download: what is fetched, what is skipped, what a second run asks for."""

import hashlib
import json
from pathlib import Path

import pytest

from duovolt.checkpoint.download_record import read_record
from duovolt.checkpoint.errors import InputError
from duovolt.convert.download import download
from duovolt.convert.standin import HubStandIn

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


def test_fetches_index_shards_and_side_files_byte_equal(hub, expected, tmp_path, tree):
    report = download(REPO, tmp_path / "dst", endpoint=hub.url)
    found = tree(tmp_path / "dst")
    record = found.pop("duovolt-download.json")
    assert found == expected
    assert "mtp.safetensors" in found and "layers-22.safetensors" in found
    assert {file.name for file in report.files} == set(expected)
    assert report.total == report.needed == sum(map(len, expected.values()))
    assert set(report.skipped) == {".gitattributes", "pytorch_model.bin", "model.Q4.gguf"}
    assert report.commit == hub.commit(REPO) == json.loads(record)["commit"]


def test_record_tells_repo_commit_and_digests(hub, expected, tmp_path):
    download(REPO, tmp_path / "dst", endpoint=hub.url, revision="main")
    record = read_record(tmp_path / "dst")
    assert record is not None
    assert (record.repo, record.revision, record.commit) == (REPO, "main", hub.commit(REPO))
    assert set(record.files) == set(expected)
    shard, side = record.files[SHARD], record.files["chat_template.jinja"]
    assert shard.digest_kind == "sha256" and shard.digest == hashlib.sha256(expected[SHARD]).hexdigest()
    template = expected["chat_template.jinja"]
    assert side.digest_kind == "git-sha1"
    assert side.digest == side.etag == hashlib.sha1(b"blob %d\0" % len(template) + template).hexdigest()
    assert shard.size == len(expected[SHARD])


def test_every_file_is_asked_for_at_the_pinned_commit(hub, repo, tmp_path):
    """A branch that moves in mid-download must not mix two uploads."""
    commit = hub.commit(REPO)
    hub.edit_listing = lambda listing: listing | {"sha": commit}
    (repo / "chat_template.jinja").write_text("moved")
    with pytest.raises(InputError, match="no such revision"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_second_run_hashes_and_asks_for_nothing_but_the_listing(hub, repo, tmp_path, tree):
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    before = tree(tmp_path / "dst")
    hub.log.clear()
    report = download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert [served.name for served in hub.log] == ["api"]
    assert report.needed == 0 and tree(tmp_path / "dst") == before


@pytest.mark.parametrize("damage", ["cut", "flip", "longer", "gone"])
def test_damaged_file_alone_is_fetched_again(hub, expected, tmp_path, tree, recorder, damage):
    """D03: found by size, then by digest; nothing else is asked for."""
    dst = tmp_path / "dst"
    download(REPO, dst, endpoint=hub.url)
    whole = tree(dst)
    content = bytearray(whole[SHARD])
    if damage == "cut":
        (dst / SHARD).write_bytes(content[:-1])
    elif damage == "flip":
        content[77_777] ^= 4
        (dst / SHARD).write_bytes(content)
    elif damage == "longer":
        (dst / SHARD).write_bytes(content + b"12345678")
    else:
        (dst / SHARD).unlink()
    hub.log.clear()
    report = download(REPO, dst, endpoint=hub.url, progress=recorder)
    assert {served.name for served in hub.log} == {"api", SHARD}
    assert hub.bytes_served(SHARD) == report.needed == len(content)
    assert tree(dst) == whole
    assert [text.split(":")[0] for text in recorder.notices] == ([] if damage == "gone" else [SHARD])


def test_another_revision_replaces_what_changed_and_nothing_else(hub, repo, expected, tmp_path):
    dst = tmp_path / "dst"
    download(REPO, dst, endpoint=hub.url)
    first = read_record(dst)
    (repo / "chat_template.jinja").write_text("new template")
    hub.log.clear()
    download(REPO, dst, endpoint=hub.url)
    second = read_record(dst)
    assert first is not None and second is not None and first.commit != second.commit
    assert {served.name for served in hub.log} == {"api", "chat_template.jinja"}
    assert (dst / "chat_template.jinja").read_text() == "new template"


def test_record_is_withdrawn_while_a_revision_is_mixed(hub, repo, tmp_path):
    dst = tmp_path / "dst"
    download(REPO, dst, endpoint=hub.url)
    (repo / "chat_template.jinja").write_text("new template")
    commit = hub.commit(REPO)
    (repo / "chat_template.jinja").write_text("newer template")
    hub.edit_listing = lambda listing: listing | {"sha": commit}  # every file request will be refused
    with pytest.raises(InputError):
        download(REPO, dst, endpoint=hub.url)
    pending = read_record(dst, pending=True)
    assert read_record(dst) is None and pending is not None and pending.commit == commit


def test_single_file_without_index(make_repo, hub, tmp_path):
    folder = make_repo("org/single", (5000,))
    (folder / "model.safetensors.index.json").unlink()
    (folder / SHARD).rename(folder / "model.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    report = download("org/single", tmp_path / "dst", endpoint=hub.url)
    assert (tmp_path / "dst/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not (tmp_path / "dst/consolidated.safetensors").exists() and "consolidated.safetensors" in report.skipped


def test_digest_asked_by_head_when_the_listing_is_silent(hub, expected, tmp_path, tree):
    def silent(listing):
        bare = [{"rfilename": sibling["rfilename"]} for sibling in listing["siblings"]]
        return listing | {"siblings": bare}

    hub.edit_listing = silent
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    found = tree(tmp_path / "dst")
    del found["duovolt-download.json"]
    assert found == expected
    heads = {served.name for served in hub.log if served.method == "HEAD"}
    assert heads == set(expected)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_result_does_not_depend_on_workers(hub, repo, tmp_path, tree, workers):
    download(REPO, tmp_path / "one", endpoint=hub.url, workers=1)
    download(REPO, tmp_path / "dst", endpoint=hub.url, workers=workers)
    assert tree(tmp_path / "dst") == tree(tmp_path / "one")


def test_manifest_of_a_converted_repository_comes_last(hub, repo, tmp_path):
    (repo / "duovolt.json").write_text("{}")
    download(REPO, tmp_path / "dst", endpoint=hub.url, workers=8)
    contents = [served.name for served in hub.log if served.body_bytes]
    assert contents[-1] == "duovolt.json"


def test_dry_run_plans_and_writes_nothing(hub, expected, tmp_path):
    report = download(REPO, tmp_path / "dst", endpoint=hub.url, dry_run=True)
    assert not (tmp_path / "dst").exists()
    assert {file.name: file.size for file in report.files} == {name: len(data) for name, data in expected.items()}
    assert {file.defect for file in report.files} == {"missing"} and report.needed == report.total
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    (tmp_path / "dst" / SHARD).unlink()
    report = download(REPO, tmp_path / "dst", endpoint=hub.url, dry_run=True)
    assert [file.name for file in report.files if file.defect] == [SHARD]
    assert report.needed == len(expected[SHARD]) and not (tmp_path / "dst" / SHARD).exists()


def test_stand_in_satisfies_the_hub_library_itself(repo, tmp_path):
    """The stand-in is judged by a client that is not ours."""
    from huggingface_hub import snapshot_download

    with HubStandIn(tmp_path / "hub") as standin:
        snapshot_download(REPO, endpoint=standin.url, local_dir=tmp_path / "theirs", max_workers=1)
    for path in repo.rglob("*"):
        if path.is_file():
            assert (tmp_path / "theirs" / path.relative_to(repo)).read_bytes() == path.read_bytes()


def test_broken_record_is_refused_with_its_name(tmp_path):
    (tmp_path / "duovolt-download.json").write_text('{"format_version": 1}')
    with pytest.raises(InputError, match=r"duovolt-download\.json: not a download record"):
        read_record(tmp_path)
    assert read_record(Path(tmp_path / "elsewhere")) is None
