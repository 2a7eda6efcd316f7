"""What an operator sees of a server: metrics, the request log, keys, TLS, CORS, the switch of conversions."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.messages import CancelRequest, GenerateRequest, SamplingParams, TokenEvent
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.proxy.key import KeyRing, read_keys
from duovolt.runtime.proxy.log_file import LogFile
from duovolt.runtime.proxy.request_log import Entry
from duovolt.runtime.proxy.request_log import _line as request_line

from .conftest import Server, running
from .stub_model import blocks, ids, make_ranks, write_script

USER: list[Any] = [{"role": "user", "content": "a secret question"}]
CHAT = "/v1/chat/completions"
QUICK = {"blocks": blocks("Think.\n</think>\n\nHello world", 2), "delay_ms": 2}
SLOW = {"blocks": [[token] for token in ids("</think>" + "x" * 3000)], "delay_ms": 20}

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operation")
    script = write_script(folder / "script.jsonl", QUICK)
    (folder / "keys").write_text("first\n\n  second \n")
    origins = ["--cors-origin", "https://chat.example.org", "--cors-origin", "http://localhost:3000"]
    yield from running(
        make_ranks(folder / "ranks", 2), "--backend", f"scripted:{script}", "--api-key-file", folder / "keys",
        "--log-requests", folder / "requests.jsonl", *origins,
    )  # fmt: skip


def scrape(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, read by the parser of Prometheus's own library."""
    with server.client() as client:
        text = client.get("/metrics").text
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def ask(server: Server, key: str = "first", **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(CHAT, json={"messages": USER} | body, headers={"Authorization": f"Bearer {key}"})


def test_metrics_tell_outcomes_tokens_lanes_and_ranks(server: Server) -> None:
    before = scrape(server)
    assert ask(server).status_code == 200
    assert ask(server, max_tokens=3).status_code == 200
    assert ask(server, temperature="hot").status_code == 400
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        key = tuple(sorted(labels.items()))
        return after[name][key] - before.get(name, {}).get(key, 0)

    tokens = sum(map(len, QUICK["blocks"])) + 3
    assert grown("duovolt_answers_total", outcome="finished") == 2
    assert grown("duovolt_requests_total") == 2
    assert after["duovolt_finish_reasons_total"][(("reason", "length"),)] >= 1
    assert grown("duovolt_completion_tokens_total") == tokens
    assert 0 < grown("duovolt_accepted_total") <= grown("duovolt_proposed_total")
    for name in ("queue_seconds", "first_token_seconds", "token_seconds", "answer_seconds", "prompt_length_tokens"):
        assert grown(f"duovolt_{name}_count") == 2
    assert grown("duovolt_answer_length_tokens_sum") == tokens
    assert grown("duovolt_step_tokens_sum") == tokens
    assert 0.002 < grown("duovolt_first_token_seconds_sum") < 5
    assert grown("duovolt_http_responses_total", path=CHAT, status="200") == 2
    assert grown("duovolt_http_responses_total", path=CHAT, status="400") == 1
    for rank in "01":
        assert after["duovolt_lockstep_records"][(("rank", rank),)] >= 8
        assert after["duovolt_rank_steps"][(("rank", rank),)] >= 8
        assert after["duovolt_rank_last_step_seconds"][(("rank", rank),)] < 5
        assert after["duovolt_rank_fp16_overflows"][(("rank", rank),)] == 0
    assert after["duovolt_lanes"][()] == 1 and after["duovolt_ready"][()] == 1 and after["duovolt_running"][()] == 0
    assert after["process_resident_memory_bytes"][()] > 1e6
    ((labels, one),) = after["duovolt_server_info"].items()
    assert one == 1 and dict(labels)["backend"] == "scripted" and dict(labels)["collective"] == "mailbox-cpu"


def test_a_path_that_does_not_exist_makes_no_label(server: Server) -> None:
    with server.client() as client:
        assert client.get("/v1/" + "x" * 50).status_code == 404
    paths = {dict(labels)["path"] for labels in scrape(server)["duovolt_http_responses_total"]}
    assert "other" in paths and not any("xxx" in path for path in paths)


def read_log(path: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 5
    while len(lines := path.read_text().splitlines() if path.exists() else []) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.02)
    return [json.loads(line) for line in lines]


def test_the_log_tells_how_it_went_and_not_what_was_said(start_server: Start, tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", QUICK, SLOW)
    log = tmp_path / "requests.jsonl"
    server = start_server(
        make_ranks(tmp_path / "ranks", 1), "--backend", f"scripted:{script}", "--log-requests", log
    )  # fmt: skip
    assert ask(server, stream=True).status_code == 200
    with httpx.stream("POST", server.url + CHAT, json={"messages": USER, "stream": True}, timeout=20) as response:
        for line in response.iter_lines():
            if '"content":"x' in line:
                break
    ask(server, messages=[])
    with server.client() as client:
        client.get("/health/live")
    whole, left, refused = read_log(log, 3)
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", CHAT, 200)
    assert whole["client"].startswith("127.0.0.1:")
    (answer,) = whole["answers"]
    assert (answer["outcome"], answer["finish"]) == ("finished", "stop")
    assert answer["completion_tokens"] == sum(map(len, QUICK["blocks"]))
    assert 0 < answer["prepared_ms"] + answer["first_token_ms"] < whole["ms"]
    assert abs(datetime.fromisoformat(whole["time"]).timestamp() - time.time()) < 60
    assert left["answers"][0]["outcome"] == "cancelled" and left["answers"][0]["completion_tokens"] >= 2
    assert (refused["status"], refused["answers"]) == (400, [])
    text = log.read_text()
    assert "secret" not in text and "Hello" not in text
    assert log.stat().st_mode & 0o777 == 0o600
    log.rename(tmp_path / "moved")  # as logrotate does
    ask(server, max_tokens=1)
    assert read_log(log, 1)[0]["answers"][0]["completion_tokens"] == 1


def test_content_is_logged_only_where_asked_for(start_server: Start, tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", QUICK)
    log = tmp_path / "requests.jsonl"
    server = start_server(
        make_ranks(tmp_path / "ranks", 1), "--backend", f"scripted:{script}", "--log-requests", log, "--log-content"
    )
    ask(server)
    with server.client() as client:
        client.post(CHAT, content=b"\xff{", headers={"Authorization": "Bearer topsecretkey"})
    whole, broken = read_log(log, 2)
    assert whole["request"]["messages"] == USER
    assert whole["response"]["choices"][0]["message"]["content"] == "Hello world"
    assert broken["request"] == "\ufffd{" and broken["response"]["error"]["type"] == "invalid_request_error"
    assert "topsecretkey" not in log.read_text()


def test_a_log_that_cannot_be_written_is_refused_or_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--log-requests"):
        LogFile(tmp_path / "none" / "log")
    log = LogFile(Path("/dev/full"))
    log.write("a")
    log.write("b")
    log.close()
    assert log.lost == 2
    assert capfd.readouterr().err.count("the request log loses lines") == 1


def test_a_line_after_one_that_the_disk_had_no_room_for_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, calls, log = os.write, [], LogFile(tmp_path / "log")

    def write(file: int, data: bytes) -> int:
        if file != log._file:
            return sound(file, data)
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return sound(file, data[:3] if len(calls) == 1 else data)

    monkeypatch.setattr("duovolt.runtime.proxy.log_file.os.write", write)
    for number in range(3):
        log.write(json.dumps({"line": number}))
    log.close()
    monkeypatch.undo()
    assert (tmp_path / "log").read_text().splitlines() == ['{"l', '{"line": 1}', '{"line": 2}'] and log.lost == 1


@pytest.mark.parametrize("key", ["first", "second"])
def test_each_key_of_the_file_opens(server: Server, key: str) -> None:
    with server.client() as client:
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for wrong in ({}, {"Authorization": f"Bearer {key}x"}, {"x-api-key": ""}, {"Authorization": key[:-1]}):
            assert client.get("/v1/models", headers=wrong).status_code == 401


def test_a_ring_without_keys_admits_everyone_and_every_key_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hmac

    assert KeyRing([]).admits("")
    compared: list[Any] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    ring = KeyRing(["a", "b" * 500, "c"])
    assert ring.admits("a") and not ring.admits("")
    assert compared == [(32, 32)] * 6
    (tmp_path / "keys").write_text("a\nb\x00c")
    with pytest.raises(InputError, match="key 2 holds a character"):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize("host, said", [("::1", "[::1]:5"), ("127.0.0.1", "127.0.0.1:5")])
def test_a_line_of_the_log_tells_address_from_port(host: str, said: str) -> None:
    scope = {"type": "http", "client": (host, 5), "method": "GET", "path": "/"}
    assert json.loads(request_line(scope, Entry(1), False))["client"] == said


def test_only_named_origins_may_read_answers(server: Server) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with server.client() as client:
        good = client.options(CHAT, headers={"Origin": "https://chat.example.org", **asked})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert "authorization" in good.headers["access-control-allow-headers"]
        assert client.options(CHAT, headers={"Origin": "https://evil.example.org", **asked}).status_code == 400
        # A page from elsewhere asks so for a server at home.
        home = {"Origin": "https://chat.example.org", "Access-Control-Request-Private-Network": "true"}
        granted = client.options(CHAT, headers=home | asked)
        assert (granted.status_code, granted.headers["access-control-allow-private-network"]) == (200, "true")
        refused = client.post(CHAT, json={}, headers={"Origin": "http://localhost:3000"})
        assert refused.status_code == 401  # also an error must be readable
        assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert refused.headers["access-control-expose-headers"] == "Retry-After, X-Request-Id"
        plain = client.get("/health/live", headers={"Origin": "https://evil.example.org"})
        assert "access-control-allow-origin" not in plain.headers


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_by_files(start_server: Start, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "good")
    script = write_script(tmp_path / "script.jsonl", QUICK)
    server = start_server(
        make_ranks(tmp_path / "ranks", 1), "--backend", f"scripted:{script}", "--tls-cert", cert, "--tls-key", key
    )
    assert server.url.startswith("https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(cert))
    body = {"messages": USER, "stream": True}
    lines = [line for line in httpx.post(server.url + CHAT, json=body, verify=trust).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and any('"content":"Hello' in line for line in lines)
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health/live")
    command = [sys.executable, "-m", "duovolt", "chat", "--url", server.url, "--once", "hi", "--quiet"]
    judge = [sys.executable, "-m", "duovolt", "eval", "--url", server.url, "--what", "text", "--score-bytes", "50"]
    untrusted = f"duovolt: {server.url}: its certificate is not trusted ("
    for environment, codes, words in (
        ({"SSL_CERT_FILE": str(cert)}, (0, 1), ("", "duovolt: /v1/completions: tokens, ")),  # a script scores no text
        ({}, (3, 3), (untrusted, untrusted)),
    ):
        for asking, code, said in zip((command, judge), codes, words, strict=True):
            done = subprocess.run(asking, capture_output=True, text=True, env=os.environ | environment, timeout=30)
            assert done.returncode == code and done.stderr.startswith(said), done.stderr
            assert done.stderr.count("\n") == bool(code)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(5) == 0
    assert time.monotonic() - start < 2
    assert "Traceback" not in server.log


def test_tls_files_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    from duovolt.runtime.proxy.tls import check_tls

    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    (tmp_path / "text").write_text("no certificate")
    os.mkfifo(tmp_path / "pipe")
    check_tls(None, None)
    check_tls(cert, key)
    for files, words in {
        (cert, None): "--tls-cert is given without --tls-key",
        (None, key): "--tls-key is given without --tls-cert",
        (tmp_path / "none", key): "No such file",
        (tmp_path / "pipe", key): "not a file",
        (tmp_path / "text", key): "not a PEM certificate",
        (cert, cert): "not a PEM certificate",
        (cert, other): "is not the key of the certificate",
        (cert, locked): "is encrypted",
    }.items():
        with pytest.raises(InputError, match=words):
            check_tls(*files)


def test_a_link_turned_back_and_a_restart_serve_the_previous_conversion(start_server: Start, tmp_path: Path) -> None:
    """The documented way back: `ln -sfn ranks-before current`, then restart."""
    script = write_script(tmp_path / "script.jsonl", SLOW)
    for name in ("ranks-before", "ranks-now"):
        make_ranks(tmp_path / name, 2)
    current = tmp_path / "current"
    subprocess.run(["ln", "-sfn", "ranks-now", "current"], cwd=tmp_path, check=True)
    server = start_server(current, "--backend", f"scripted:{script}")
    assert _rank_folders(server) == {str(tmp_path / "ranks-now" / f"rank-{rank}-of-2") for rank in (0, 1)}
    subprocess.run(["ln", "-sfn", "ranks-before", "current"], cwd=tmp_path, check=True)
    os.kill(server.rank_pids()[0], signal.SIGKILL)  # a restart of the ranks alone stays with what the server began with
    server.wait_log("ready on", count=2)
    assert _rank_folders(server) == {str(tmp_path / "ranks-now" / f"rank-{rank}-of-2") for rank in (0, 1)}
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(5) == 0
    again = start_server(current, "--backend", f"scripted:{script}")
    assert _rank_folders(again) == {str(tmp_path / "ranks-before" / f"rank-{rank}-of-2") for rank in (0, 1)}


def _rank_folders(server: Server) -> set[str]:
    lines = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in server.rank_pids()]
    return {words[words.index("--dir") + 1] for words in lines}


def test_a_request_that_finds_no_lane_in_time_is_counted_by_itself() -> None:
    async def wait() -> Hub:
        hub = Hub(lanes=1, max_waiting=1, max_wait_seconds=0.02)
        sent: list[Any] = []
        hub.send = sent.append
        hub.submit([GenerateRequest(0, [1], 9, [], False, SamplingParams())])
        await asyncio.sleep(0.2)
        assert [type(message) for message in sent] == [GenerateRequest, CancelRequest]
        return hub

    hub = asyncio.run(wait())
    assert (hub.open_count, hub.counters.expired, hub.counters.cancelled, hub.counters.finished) == (0, 1, 0, 0)


def test_a_pause_of_the_whole_machine_is_no_wait_for_a_lane() -> None:
    """A container frozen for longer than --max-wait-seconds: its ranks made no lane free meanwhile."""

    async def wait() -> Hub:
        hub = Hub(lanes=1, max_waiting=1, max_wait_seconds=1.0)
        hub.send = lambda message: None
        (opened,) = hub.submit([GenerateRequest(0, [1], 9, [], False, SamplingParams())])
        await asyncio.sleep(0.02)
        time.sleep(1.5)
        await asyncio.sleep(0.1)
        assert hub.counters.expired == 0
        hub.relay([TokenEvent(opened.request.request_id, [], [], None, 0, 0, 1, admitted=True)])
        await asyncio.sleep(1.0)
        return hub

    hub = asyncio.run(wait())
    assert (hub.open_count, hub.counters.expired) == (1, 0)


def test_the_service_manager_hears_of_ready_and_of_stopping(start_server: Start, tmp_path: Path) -> None:
    """It is read from the start, as a manager reads: a socket holds ten words, and what comes then is lost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        script = write_script(tmp_path / "script.jsonl", QUICK)
        server = start_server(
            make_ranks(tmp_path / "ranks", 1), "--backend", f"scripted:{script}", NOTIFY_SOCKET=str(tmp_path / "notify"),
            WATCHDOG_USEC="1000000", ready=False,
        )  # fmt: skip

        def heard(wanted: bytes) -> int:
            """Signs of life before the message `wanted`."""
            for count in range(1000):
                if (message := manager.recv(100)) == wanted:
                    return count
                assert message == b"WATCHDOG=1"
            raise AssertionError(wanted)

        assert heard(b"READY=1") >= 1
        server.wait_ready()
        heard(b"WATCHDOG=1")
        os.kill(server.pid, signal.SIGSTOP)  # a proxy that stands still gives none
        manager.settimeout(1.1)
        with pytest.raises(TimeoutError):
            heard(b"STOPPING=1")
        os.kill(server.pid, signal.SIGCONT)
        manager.settimeout(30)
        server.process.send_signal(signal.SIGTERM)
        heard(b"STOPPING=1")
        # From here on nobody reads, and nobody waits for that.
        assert server.wait_exit(30) == 0


def test_status_is_a_picture_without_words(server: Server) -> None:
    with server.client() as client:
        picture = client.get("/status").json()
    assert picture["ready"] is True and picture["running"] == 0 and picture["lanes"] == []
    assert [rank["rank"] for rank in picture["ranks"]] == [0, 1]
    assert picture["server"]["collective"] == "mailbox-cpu"
    assert [rank["fp16_overflows"] for rank in picture["ranks"]] == [0, 0]
    assert bool(picture["cards"]) != bool(picture["cards_missing"])
