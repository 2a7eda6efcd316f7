"""The files an operator copies: each is read by its own reader, and what it names exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from duovolt.cli import serve as command
from duovolt.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONS = {option.name: option for option in command.server_options()}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined, comments dropped."""
    text = "\n".join(line for line in (PACKAGING / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def extras(text: str) -> set[str]:
    """The extras of duovolt that a pip command names."""
    return {extra for found in re.findall(r"(?:duovolt|/source)\[([a-z,]+)\]", text) for extra in found.split(",")}


def test_the_image_has_a_pinned_base_of_cuda_12() -> None:
    bases = [rest for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 1
    assert re.fullmatch(r"nvidia/cuda:12\.\d+\.\d+-base-ubuntu24\.04", bases[0])  # a whole version, never `latest`


def test_the_image_installs_what_the_project_names() -> None:
    text = " ".join(rest for word, rest in instructions() if word == "RUN")
    assert extras(text) == {"cuda", "serve", "monitor"} <= set(PROJECT["optional-dependencies"])
    assert set(re.findall(r"torch==(\S+)", text)) == {"2.7.1"}  # the last default build with code for a V100


def test_the_image_runs_as_nobody_and_says_how_it_is() -> None:
    found = dict(instructions())
    assert found["USER"] == "duovolt"
    assert [word for word, _ in instructions()].index("USER") > max(
        number for number, (word, _) in enumerate(instructions()) if word == "RUN"
    )
    check = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "healthcheck", "exec")
    assert "/health/live" in check[2]
    assert json.loads(found["ENTRYPOINT"]) == ["duovolt"] and json.loads(found["CMD"])[0] in COMMANDS
    variables = [pair for word, rest in instructions() if word == "ENV" for pair in shlex.split(rest)]
    named = {name for name, _, _ in (pair.partition("=") for pair in variables) if name.startswith("DUOVOLT_")}
    assert named - {"DUOVOLT_RANKS"} <= {option.variable for option in OPTIONS.values()}


def test_the_image_asks_itself_how_it_is_whatever_proxy_its_host_gives_it() -> None:
    """Docker hands the proxies of `~/.docker/config.json` to every container."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    check = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    proxies = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for word, code in ((str(server.server_address[1]), 0), (f"{server.server_address[1]}/elsewhere", 1)):
            command = [sys.executable, "-c", check[2].replace(":8000", f":{word}")]
            done = subprocess.run(command, env=os.environ | proxies, capture_output=True, timeout=30)
            assert done.returncode == code
        server.shutdown()


def test_the_example_configuration_is_taken_whole_also_with_its_comments() -> None:
    text = (PACKAGING / "serve.toml").read_text()
    full = re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE)
    assert len(tomllib.loads(full)) > len(tomllib.loads(text))
    for name, value in tomllib.loads(full).items():
        if name != "ranks":
            for one in value if isinstance(value, list) else [value]:
                OPTIONS[name].parse(str(one))


def test_the_unit_names_options_that_exist(tmp_path: Path) -> None:
    unit = (PACKAGING / "duovolt.service").read_text()
    words = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])  # type: ignore[index]
    assert words[1] in COMMANDS
    assert [word for word in words if word.startswith("--")] == ["--config"]
    assert extras(unit) <= set(PROJECT["optional-dependencies"])


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = (PACKAGING / "duovolt.service").read_text().replace("/opt/duovolt/bin/duovolt", "/bin/true")
    (tmp_path / "duovolt.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "duovolt.service"], capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if "duovolt.service" in line]
    assert done.returncode == 0 and complaints == [], done.stderr
