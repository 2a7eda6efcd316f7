"""Resuming across processes: kills at any moment, partials of every kind, one process at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.lock import DirectoryLock
from duovolt.convert.download import download
from duovolt.convert.standin import Fault

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"
PART = f".{SHARD}.part"

# Runs a download in forked children, the n-th of which is killed at its n-th write; prints their wait statuses.
KILLED_AT_EVERY_WRITE = """
import json, os, sys
from pathlib import Path
from duovolt.convert.download import download
repo, url, root, first, last = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
statuses = []
for n in range(first, last + 1):
    child = os.fork()
    if child == 0:
        os.environ["DUOVOLT_STOP_AT_WRITE"] = str(n)
        download(repo, root / str(n), endpoint=url, workers=1)
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


@pytest.fixture
def whole(hub, repo, tmp_path, tree):
    """The tree of an unbroken run."""
    download(REPO, tmp_path / "whole", endpoint=hub.url)
    hub.log.clear()
    return tree(tmp_path / "whole")


def wait_for(path: Path, size: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_killed_in_mid_file_asks_only_for_the_rest(hub, whole, tmp_path, tree, command, environment):
    """D01: a killed process's bytes are not fetched twice."""
    dst, size = tmp_path / "dst", len(whole[SHARD])
    hub.faults.append(Fault("slow", SHARD, 60))
    process = subprocess.Popen(command("download", REPO, dst, "--endpoint", hub.url), env=environment)
    wait_for(dst / PART, size // 2, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = (dst / PART).stat().st_size
    assert size // 2 <= kept < size and not (dst / SHARD).exists() and not (dst / "duovolt-download.json").exists()
    hub.log.clear()
    subprocess.run(command("download", REPO, dst, "--endpoint", hub.url), env=environment, check=True, timeout=60)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == [f"bytes={kept}-"]
    assert hub.bytes_served(SHARD) == size - kept
    assert tree(dst) == whole


def test_killed_at_every_write_fsync_and_rename(make_repo, hub, tmp_path, tree, environment):
    folder = make_repo(REPO, (100_000,))
    for name in ("chat_template.jinja", "foo_config.json", "empty.txt", ".gitattributes"):
        (folder / name).unlink()
    download(REPO, tmp_path / "whole", endpoint=hub.url)
    whole = tree(tmp_path / "whole")
    counter, root = tmp_path / "count", tmp_path / "killed"
    program = "import sys; from pathlib import Path; from duovolt.convert.download import download\n"
    program += "download(sys.argv[1], Path(sys.argv[3]), endpoint=sys.argv[2], workers=1)"
    arguments = [sys.executable, "-c", program, REPO, hub.url, str(tmp_path / "counted")]
    subprocess.run(arguments, env=environment | {"DUOVOLT_COUNT_WRITES": str(counter)}, check=True, timeout=60)
    assert tree(tmp_path / "counted") == whole
    count = int(counter.read_text())
    # The download's pending record (4 events). Four files: their partial's record (4), bytes (2 blocks for the shard),
    # fsync, rename, the directory's fsync; the index, known from the plan, is put in one go (1); then the record gets
    # its final name (2).
    assert count == 4 + 4 * (4 + 1 + 3) + 1 + 1 + 2
    root.mkdir()
    arguments = [sys.executable, "-c", KILLED_AT_EVERY_WRITE, REPO, hub.url, str(root), "1", str(count)]
    done = subprocess.run(arguments, env=environment, check=True, timeout=170, capture_output=True, text=True)
    assert json.loads(done.stdout) == [-signal.SIGKILL] * count
    for n in range(1, count + 1):
        dst = root / str(n)
        finished = {name: content for name, content in tree(dst).items() if not Path(name).name.startswith(".")}
        assert all(whole[name] == content for name, content in finished.items()), n
        if "duovolt-download.json" in finished:
            assert finished == whole, n
        download(REPO, dst, endpoint=hub.url)
        assert tree(dst) == whole, n


@pytest.mark.parametrize("kept", [0, 1, 4096, 149_999])
def test_partial_is_continued_at_its_end(hub, whole, tmp_path, tree, kept):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, whole[SHARD][:kept])
    download(REPO, dst, endpoint=hub.url)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == [f"bytes={kept}-" if kept else None]
    assert tree(dst) == whole


def test_complete_partial_needs_no_request(hub, whole, tmp_path, tree):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, whole[SHARD])
    download(REPO, dst, endpoint=hub.url)
    assert hub.requests(SHARD) == [] and tree(dst) == whole


def plant_partial(hub, dst: Path, content: bytes, **changes: object) -> None:
    """`content` as the partial of the first shard, with the record that a killed run leaves, changed by `changes`."""
    dst.mkdir(exist_ok=True)
    blob = hub.files(REPO)[SHARD]
    record = {"commit": hub.commit(REPO), "size": blob.size, "digest_kind": "sha256", "digest": blob.sha256} | changes
    (dst / PART).write_bytes(content)
    (dst / f"{PART}.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "content", "changes", "why"),
    [
        ("longer by ten bytes", lambda whole: whole + b"0123456789", {}, "more than the whole file has"),
        ("of another etag", lambda whole: whole[:1000], {"digest": "0" * 64}, "another version"),
        ("of another length", lambda whole: whole[:1000], {"size": 5}, "another version"),
        ("with a broken record", lambda whole: whole[:1000], {"strange": 1}, "no record"),
    ],
)
def test_partial_that_does_not_fit_is_thrown_away_once(
    hub, whole, tmp_path, tree, recorder, name, content, changes, why
):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, content(whole[SHARD]), **changes)
    download(REPO, dst, endpoint=hub.url, progress=recorder)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == [None]
    assert len([text for text in recorder.notices if SHARD in text]) == 1 and why in recorder.notices[0]
    assert tree(dst) == whole


def test_partial_without_record_is_thrown_away(hub, whole, tmp_path, tree, recorder):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, b"whose bytes?")
    (dst / f"{PART}.json").unlink()
    download(REPO, dst, endpoint=hub.url, progress=recorder)
    assert "no record of what it is part of" in recorder.notices[0] and tree(dst) == whole


def test_partial_with_wrong_bytes_is_found_by_the_digest(hub, whole, tmp_path, tree, recorder):
    """The state of the hash is made from the partial itself: a bad beginning cannot hide behind a good end."""
    dst = tmp_path / "dst"
    plant_partial(hub, dst, b"\0" * 100_000)
    download(REPO, dst, endpoint=hub.url, progress=recorder)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == ["bytes=100000-", None]
    assert "bytes thrown away, fetched anew" in recorder.notices[0] and tree(dst) == whole


def test_partial_that_is_a_link_is_not_followed(hub, whole, tmp_path, tree):
    dst, victim = tmp_path / "dst", tmp_path / "victim"
    victim.write_text("mine")
    plant_partial(hub, dst, b"")
    (dst / PART).unlink()
    (dst / PART).symlink_to(victim)
    download(REPO, dst, endpoint=hub.url)
    assert victim.read_text() == "mine" and tree(dst) == whole


def test_partial_survives_another_revision_with_the_same_file(hub, repo, whole, tmp_path):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, whole[SHARD][:100_000])
    (repo / "chat_template.jinja").write_text("a new commit")
    download(REPO, dst, endpoint=hub.url)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == ["bytes=100000-"]


def test_partial_of_a_file_that_left_the_repository_is_swept(hub, whole, tmp_path, tree, recorder):
    dst = tmp_path / "dst"
    plant_partial(hub, dst, b"12")
    (dst / PART).rename(dst / ".old.safetensors.part")
    (dst / f"{PART}.json").rename(dst / ".old.safetensors.part.json")
    (dst / ".mine.part").write_text("not ours: no record beside it")
    download(REPO, dst, endpoint=hub.url, progress=recorder)
    found = tree(dst)
    assert found.pop(".mine.part") and found == whole
    assert any(".old.safetensors.part" in text for text in recorder.notices)


def test_second_process_is_kept_out(hub, repo, tmp_path):
    (tmp_path / "dst").mkdir()
    with DirectoryLock(tmp_path / "dst"), pytest.raises(InputError, match=f"process {os.getpid()} is writing here"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


@pytest.mark.parametrize("delay", [60, 20_000])
def test_interrupt_keeps_the_partial_and_is_quick(hub, whole, tmp_path, tree, command, environment, delay):
    """Ctrl-C while bytes trickle, and while the server says nothing."""
    dst = tmp_path / "dst"
    hub.faults.append(Fault("slow", SHARD, delay))
    arguments = command("download", REPO, dst, "--endpoint", hub.url)
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(dst / PART, 16_384, process)  # what comes is written as it comes
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and time.monotonic() - begin < 5
    assert "interrupted" in errors and "Traceback" not in errors
    kept = (dst / PART).stat().st_size
    assert kept >= 16_384  # what had arrived is on disk
    hub.faults.clear()
    hub.log.clear()
    download(REPO, dst, endpoint=hub.url)
    assert hub.bytes_served(SHARD) == len(whole[SHARD]) - kept and tree(dst) == whole
