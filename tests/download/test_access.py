"""Tokens, gates, wrong repositories and endpoints."""

import subprocess

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.convert.download import download
from duovolt.convert.standin import Fault, HubStandIn

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


def test_token_goes_to_the_hub_and_to_no_other_host(hub, repo, tmp_path, monkeypatch):
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    at_hub, at_cdn = hub.requests(server="hub"), hub.requests(server="cdn")
    assert len(at_cdn) == 3 and {served.authorization for served in at_cdn} == {None}
    assert {served.authorization for served in at_hub} == {"Bearer hf_secret"}
    assert any(served.status == 200 and served.name == "config.json" for served in at_hub)  # after a relative redirect


def test_token_does_not_come_back_through_a_second_host(hub, repo, tmp_path, monkeypatch):
    """hub -> stranger -> hub: what left without the token stays without it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubStandIn(tmp_path / "hub") as stranger:
        back = f"{hub.url}/{REPO}/resolve/main/{SHARD}"
        stranger.faults.append(Fault("redirect", SHARD, text=back, server="hub", times=None))
        away = f"{stranger.url}/{REPO}/resolve/main/{SHARD}"
        hub.faults.append(Fault("redirect", SHARD, text=away, server="hub"))
        download(REPO, tmp_path / "dst", endpoint=hub.url)
        assert [served.authorization for served in stranger.log] == [None]
        assert [served.authorization for served in hub.requests(SHARD, "hub")] == ["Bearer hf_secret", None]


@pytest.mark.parametrize(("token", "message"), [(None, "No token was sent"), ("hf_wrong", "A token was sent")])
def test_gated_repository_says_what_to_do(hub, repo, tmp_path, monkeypatch, token, message):
    hub.token = "hf_secret"
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError, match=f"gated or private.*{message}") as caught:
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert "hf_" not in str(caught.value).replace("HF_TOKEN", "") and len(hub.log) == 1
    assert not (tmp_path / "dst").exists()


def test_a_token_that_no_request_can_carry_is_told(hub, repo, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    with pytest.raises(InputError, match="the token holds a character that is not ASCII; set HF_TOKEN anew") as caught:
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert "hf_" not in str(caught.value) and not hub.log and not (tmp_path / "dst").exists()


@pytest.mark.parametrize("code", [401, 403])
def test_gate_that_closes_at_the_files(hub, repo, tmp_path, code):
    hub.faults.append(Fault("status", SHARD, code, times=None, server="hub"))
    with pytest.raises(InputError, match=f"{SHARD}: gated or private .the server answers {code}"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert len(hub.requests(SHARD)) == 1


def test_unknown_repository(hub, tmp_path):
    with pytest.raises(InputError, match="org/nothing at revision main: no such repository"):
        download("org/nothing", tmp_path / "dst", endpoint=hub.url)


def test_unknown_revision(hub, repo, tmp_path):
    with pytest.raises(InputError, match="org/model at revision v9: the repository has no such revision"):
        download(REPO, tmp_path / "dst", endpoint=hub.url, revision="v9")


def test_revision_can_be_a_commit(hub, repo, tmp_path):
    commit = hub.commit(REPO)
    report = download(REPO, tmp_path / "dst", endpoint=hub.url, revision=commit)
    assert report.commit == report.revision == commit


@pytest.mark.parametrize("name", ["not a name", "a/b/c", "", "../x", "org/--x", "http://h/org/model"])
def test_bad_repository_name(hub, repo, tmp_path, name):
    with pytest.raises(InputError):
        download(name, tmp_path / "dst", endpoint=hub.url)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("endpoint", ["", "localhost:80", "ftp://host", "https://"])
def test_bad_endpoint(tmp_path, endpoint):
    with pytest.raises(InputError, match="--endpoint"):
        download(REPO, tmp_path / "dst", endpoint=endpoint)


@pytest.mark.parametrize("edit", [lambda listing: {}, lambda listing: [], lambda listing: listing | {"sha": "main"}])
def test_answer_that_is_no_hubs(hub, repo, tmp_path, edit):
    hub.edit_listing = edit
    with pytest.raises(InputError, match=r"org/model.*server's answer"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_answer_without_proof_is_refused(hub, repo, tmp_path):
    """Neither the listing nor the file's own headers give a digest: nothing could prove the file."""
    hub.edit_listing = lambda listing: (
        listing | {"siblings": [{"rfilename": s["rfilename"]} for s in listing["siblings"]]}
    )
    plain = hub.files

    def unproved(name):
        from dataclasses import replace

        return {file: replace(blob, sha256="opaque", git_sha1="opaque") for file, blob in plain(name).items()}

    hub.files = unproved
    with pytest.raises(InputError, match="gives no size and content digest"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)


def test_offline_switch(hub, repo, tmp_path, command, environment):
    arguments = command("download", REPO, tmp_path / "dst", "--endpoint", hub.url)
    done = subprocess.run(
        arguments, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3 and "HF_HUB_OFFLINE" in done.stderr and hub.log == []
