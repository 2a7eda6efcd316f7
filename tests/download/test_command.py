"""`duovolt download` as a user meets it."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios

import pytest

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


@pytest.fixture
def duovolt(command, environment):
    """Run `duovolt download ...`; the finished process."""

    def run(*arguments):
        return subprocess.run(
            command("download", *arguments), env=environment, capture_output=True, text=True, timeout=60
        )

    return run


def test_help_shows_an_example(duovolt):
    done = duovolt("--help")
    assert done.returncode == 0 and "duovolt download Qwen/" in done.stdout
    for option in ("--revision", "--endpoint", "--include", "--workers", "--dry-run", "--json", "--quiet", "--debug"):
        assert option in done.stdout


def test_plain_run_prints_the_outcome_and_no_bar(hub, expected, tmp_path, duovolt):
    done = duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url)
    assert done.returncode == 0 and done.stderr == ""
    assert f"{len(expected)} files" in done.stdout and hub.commit(REPO) in done.stdout
    assert "skipped pytorch_model.bin (weights in another form" in done.stdout


def test_terminal_gets_a_bar(hub, repo, tmp_path, command, environment):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a terminal of no width gets no bar
    arguments = command("download", REPO, tmp_path / "dst", "--endpoint", hub.url)
    subprocess.run(arguments, env=environment, stderr=theirs, stdout=subprocess.DEVNULL, check=True, timeout=60)
    shown = os.read(ours, 65536).decode()
    os.close(theirs)
    os.close(ours)
    assert "fetch:" in shown and "/220k" in shown


def test_quiet_prints_nothing(hub, repo, tmp_path, duovolt):
    done = duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "dst/duovolt-download.json").exists()


def test_dry_run_lists_sizes_and_state(hub, expected, tmp_path, duovolt):
    done = duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url, "--dry-run")
    assert done.returncode == 0 and not (tmp_path / "dst").exists()
    assert f"{len(expected[SHARD]):,}  {SHARD}  (missing)" in done.stdout and "Nothing was written." in done.stdout


def test_dry_run_as_json(hub, expected, tmp_path, duovolt):
    done = duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url, "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert {file["name"]: file["size"] for file in plan["files"]} == {
        name: len(data) for name, data in expected.items()
    }
    assert plan["total"] == plan["needed"] == sum(map(len, expected.values())) and plan["commit"] == hub.commit(REPO)
    assert plan["skipped"].keys() == {".gitattributes", "pytorch_model.bin", "model.Q4.gguf"}


def test_outcome_as_json(hub, expected, tmp_path, duovolt):
    duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url)
    outcome = json.loads(duovolt(REPO, tmp_path / "dst", "--endpoint", hub.url, "--json").stdout)
    assert outcome["needed"] == 0 and {file["defect"] for file in outcome["files"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["org/nothing", "dst"], 2, "no such repository"),
        ([REPO, "dst", "--revision", "v9"], 2, "no such revision"),
        ([REPO, "dst", "--include", "nothing*"], 2, "matches no file"),
        ([REPO, "dst", "--workers", "0"], 2, "--workers 0"),
        ([REPO, "file"], 2, "not a directory"),
        ([REPO, "file/below"], 3, "Not a directory"),
        ([REPO, ""], 2, "DST is empty"),
    ],
)
def test_bad_usage_is_one_line(hub, repo, tmp_path, duovolt, arguments, code, message):
    (tmp_path / "file").write_text("x")
    name, target, *options = arguments
    done = duovolt(name, tmp_path / target if target else "", "--endpoint", hub.url, *options)
    assert done.returncode == code, done.stderr
    assert message in done.stderr and done.stderr.startswith("duovolt: ") and done.stderr.count("\n") == 1


def test_debug_shows_the_traceback(hub, tmp_path, duovolt):
    done = duovolt("org/nothing", tmp_path / "dst", "--endpoint", hub.url, "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr and "InputError" in done.stderr
