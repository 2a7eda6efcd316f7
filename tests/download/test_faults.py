"""Everything a server or network does wrong, on real HTTP."""

import time

import pytest

from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.convert import hub as hub_module
from duovolt.convert import transfer as transfer_module
from duovolt.convert.download import download
from duovolt.convert.standin import Fault

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


def fetched(hub, dst, tree, expected, **options):
    """Download, and assert that the result is the unbroken one."""
    report = download(REPO, dst, endpoint=hub.url, **options)
    found = tree(dst)
    del found["duovolt-download.json"]
    assert found == expected
    return report


def test_cut_at_many_points_costs_no_byte_twice(hub, expected, tmp_path, tree):
    size = len(expected[SHARD])
    for cut in [0, 1, 2, 4095, 4096, 16383, 16384, 16385, 65536, 100_000, size - 2, size - 1]:
        hub.log.clear()
        hub.faults[:] = [Fault("cut", SHARD, cut)]
        fetched(hub, tmp_path / f"dst{cut}", tree, expected)
        ranges = [served.range for served in hub.requests(SHARD, "cdn")]
        assert ranges == [None, f"bytes={cut}-" if cut else None], cut
        assert hub.bytes_served(SHARD) == size, cut


def test_cut_again_and_again_goes_on_while_bytes_arrive(hub, expected, tmp_path, tree):
    """More cuts than the patience allows in a row: progress starts the count anew."""
    hub.faults.append(Fault("cut", SHARD, 17_000, times=None))
    fetched(hub, tmp_path / "dst", tree, expected)
    assert len(hub.requests(SHARD, "cdn")) == -(-len(expected[SHARD]) // 17_000) > 6
    assert hub.bytes_served(SHARD) == len(expected[SHARD])


def test_no_bytes_at_all_ends_after_bounded_attempts(hub, expected, tmp_path):
    hub.faults.append(Fault("cut", SHARD, 0, times=None))
    with pytest.raises(
        EnvironmentFault, match=rf"{SHARD}: .* at byte 0 of {len(expected[SHARD])} \(6 times in a row\)"
    ):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert len(hub.requests(SHARD, "cdn")) == 6
    assert not (tmp_path / "dst" / SHARD).exists() and not (tmp_path / "dst/duovolt-download.json").exists()


def test_server_that_ignores_ranges_restarts_the_file(hub, expected, tmp_path, tree, recorder):
    """D01: 200 instead of 206 is never appended."""
    hub.faults += [Fault("cut", SHARD, 50_000), Fault("whole", SHARD)]
    fetched(hub, tmp_path / "dst", tree, expected, progress=recorder)
    assert hub.bytes_served(SHARD) == 50_000 + len(expected[SHARD])
    assert [text for text in recorder.notices if "50000 bytes thrown away" in text]
    assert recorder.done == recorder.total == sum(map(len, expected.values()))


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize(("server", "name"), [("hub", "api"), ("hub", SHARD), ("cdn", SHARD), ("hub", "config.json")])
def test_passing_server_errors_are_waited_out(hub, expected, tmp_path, tree, code, server, name):
    hub.faults.append(Fault("status", name, code, times=3, server=server))
    fetched(hub, tmp_path / "dst", tree, expected)
    assert [served.status for served in hub.requests(name)][:3].count(code) == 3 or server == "cdn"


@pytest.mark.parametrize("name", ["api", SHARD])
def test_lasting_server_errors_end(hub, repo, tmp_path, name):
    hub.faults.append(Fault("status", name, 503, times=None, server="hub"))
    with pytest.raises(EnvironmentFault, match=r"answers 503.*6 times in a row"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert len(hub.requests(name)) == 6


@pytest.mark.parametrize("name", ["api", SHARD])
def test_retry_after_is_honoured(hub, expected, tmp_path, tree, name):
    hub.faults.append(Fault("status", name, 429, text="1", server="hub"))
    begin = time.monotonic()
    fetched(hub, tmp_path / "dst", tree, expected)
    assert time.monotonic() - begin >= 1.0


def test_endless_retry_after_is_an_error_not_a_hang(hub, repo, tmp_path):
    hub.faults.append(Fault("status", SHARD, 429, text="86400"))
    with pytest.raises(EnvironmentFault, match="86400 s"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_wrong_bytes_once_are_fetched_again(hub, expected, tmp_path, tree, recorder, name):
    hub.faults.append(Fault("flip", name, 7, server="cdn" if name == SHARD else "hub"))
    fetched(hub, tmp_path / "dst", tree, expected, progress=recorder)
    assert hub.bytes_served(name) == 2 * len(expected[name])
    assert any(name in text and "is not" not in text and ", not " in text for text in recorder.notices)


def test_wrong_bytes_always_fail_the_check(hub, expected, tmp_path):
    hub.faults.append(Fault("flip", SHARD, 100_000, times=None))
    with pytest.raises(CheckFailed, match=f"{SHARD}: fetched twice") as caught:
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "dst" / SHARD).exists() and not (tmp_path / "dst/duovolt-download.json").exists()
    assert hub.bytes_served(SHARD) == 2 * len(expected[SHARD])


def test_wrong_index_is_never_believed(hub, repo, tmp_path):
    hub.faults.append(Fault("flip", "model.safetensors.index.json", 30, times=None, server="hub"))
    with pytest.raises(CheckFailed, match=r"model\.safetensors\.index\.json"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert not (tmp_path / "dst").exists()


def test_etag_that_changes_after_the_listing(hub, repo, tmp_path):
    hub.faults.append(Fault("etag", SHARD, times=None, server="hub"))
    with pytest.raises(InputError, match=f"{SHARD}: the listing gives the digest .* the repository changed"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert not (tmp_path / "dst" / SHARD).exists()


def test_range_that_begins_elsewhere_is_not_appended(hub, expected, tmp_path, tree):
    hub.faults += [Fault("cut", SHARD, 50_000), Fault("shift", SHARD, 10)]
    fetched(hub, tmp_path / "dst", tree, expected)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == [None, "bytes=50000-", "bytes=50000-"]


def test_compressed_body_is_not_stored(hub, expected, tmp_path, tree):
    hub.faults.append(Fault("encoded", SHARD))
    fetched(hub, tmp_path / "dst", tree, expected)
    assert len(hub.requests(SHARD, "cdn")) == 2


def leave_partial(hub, dst, count):
    """A directory whose first shard is a partial of `count` bytes, from a run that gave up."""
    hub.faults[:] = [Fault("cut", SHARD, count), Fault("cut", SHARD, 0, times=None)]
    with pytest.raises(EnvironmentFault):
        download(REPO, dst, endpoint=hub.url)
    assert (dst / f".{SHARD}.part").stat().st_size == count
    hub.faults.clear()
    hub.log.clear()


def test_unsatisfiable_range_throws_the_partial_away_once(hub, expected, tmp_path, tree, recorder):
    """D02: 416 costs the partial once."""
    leave_partial(hub, tmp_path / "dst", 50_000)
    hub.faults.append(Fault("status", SHARD, 416))
    fetched(hub, tmp_path / "dst", tree, expected, progress=recorder)
    assert [served.range for served in hub.requests(SHARD, "cdn")] == ["bytes=50000-", None]
    assert len([text for text in recorder.notices if "no such range; 50000 bytes thrown away" in text]) == 1


def test_unsatisfiable_range_for_ever_is_no_loop(hub, repo, tmp_path):
    """D02: and never loops."""
    leave_partial(hub, tmp_path / "dst", 50_000)
    hub.faults.append(Fault("status", SHARD, 416, times=None))
    with pytest.raises(EnvironmentFault, match="416"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert len(hub.requests(SHARD, "cdn")) == 6


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "https:///x", "http://[bad", "http://h:x/"]
)
def test_redirect_to_another_scheme_is_refused(hub, repo, tmp_path, target):
    hub.faults.append(Fault("redirect", SHARD, text=target, server="hub"))
    with pytest.raises(InputError, match="not followed"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_redirect_loop_ends(hub, repo, tmp_path):
    loop = f"{hub.url}/{REPO}/resolve/main/{SHARD}"
    hub.faults.append(Fault("redirect", SHARD, text=loop, times=None, server="hub"))
    with pytest.raises(EnvironmentFault, match="redirects"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_expired_signature_is_renewed_at_the_hub(hub, expected, tmp_path, tree):
    hub.faults += [Fault("status", SHARD, 403), Fault("status", "mtp.safetensors", 401)]
    fetched(hub, tmp_path / "dst", tree, expected)
    assert len(hub.requests(SHARD, "hub")) == 2


def test_trickle_counts_as_a_dead_connection(hub, expected, tmp_path, tree, monkeypatch):
    monkeypatch.setattr(transfer_module, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(transfer_module, "STALL_BYTES", 40_000)
    hub.faults.append(Fault("slow", SHARD, 150))
    fetched(hub, tmp_path / "dst", tree, expected)
    assert len(hub.requests(SHARD, "cdn")) == 2


def test_silent_server_times_out(hub, expected, tmp_path, tree, monkeypatch):
    monkeypatch.setattr(transfer_module.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults.append(Fault("slow", SHARD, 5_000))
    begin = time.monotonic()
    fetched(hub, tmp_path / "dst", tree, expected)
    assert time.monotonic() - begin < 4


def test_nobody_listens(hub, repo, tmp_path, monkeypatch):
    with pytest.raises(EnvironmentFault, match=r"org/model at revision main: ConnectError.*6 times"):
        download(REPO, tmp_path / "dst", endpoint="http://127.0.0.1:9")
    assert hub_module.LONGEST_WAIT == 300


def test_one_failure_stops_the_other_workers(hub, expected, tmp_path):
    """A worker that waits for a slow server must not hold up the error of another."""
    hub.faults += [Fault("slow", SHARD, 8_000), Fault("status", "layers-22.safetensors", 404)]
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"layers-22\.safetensors: the server answers 404"):
        download(REPO, tmp_path / "dst", endpoint=hub.url, workers=8)
    assert time.monotonic() - begin < 5
