"""Two reference ranks over a real tiny model, from converted weights to HTTP; and what happens to mixed-up directories."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, leftovers, running
from .real_model import make_ranks
from .stub_model import ids

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 24,
    "ignore_eos": True,
    "logprobs": True,
}
GREEDY = ASK | {"temperature": 0}

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    for size in (1, 2):
        make_ranks(folder, size)
    return folder


def tokens(server: Server, body: dict[str, Any]) -> list[list[int]]:
    """The answer's tokens as their bytes."""
    with server.client(60) as client:
        answer = client.post(CHAT, json=body).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert answer["usage"]["completion_tokens"] == len(entries) == body["max_tokens"]
    assert all(-50 < entry["logprob"] <= 0 for entry in entries)
    return [entry["bytes"] for entry in entries]


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Server]:
    yield from running(folder / "ranks-2", "--max-context", "512", "--lanes", "2")


def test_widths_drafts_and_repetitions_give_the_same_greedy_tokens(
    start_server: Start, folder: Path, two: Server, tmp_path: Path
) -> None:
    """M02 through the server."""
    expected = tokens(two, GREEDY)
    assert tokens(two, GREEDY) == expected
    assert two.metric("proposed_total") > 0
    one = start_server(
        folder / "ranks-1" / "rank-0-of-1", "--max-context", "512", "--prefill-chunk", "7", "--drafts", "0"
    )
    assert tokens(one, GREEDY) == expected
    assert one.metric("proposed_total") == 0
    (tmp_path / "drafts.json").write_text(json.dumps([ids("a"), ids("abc"), [], ids("Hello")] * 6))
    forced = start_server(folder / "ranks-2", "--max-context", "512", "--drafts-from", tmp_path / "drafts.json")
    assert tokens(forced, GREEDY) == expected
    assert forced.metric("proposed_total") > 4


def test_each_answer_tells_its_own_drafts_and_how_many_stood(start_server: Start, folder: Path, tmp_path: Path) -> None:
    """Two at a time over two ranks; a bias decides what each says, so what stands of the given drafts can be reckoned."""
    (yes,), (no,) = ids("a"), ids("b")
    (tmp_path / "drafts.json").write_text(json.dumps([[yes, yes, no]] * 30))
    server = start_server(
        folder / "ranks-2", "--max-context", "512", "--lanes", "2", "--drafts-from", tmp_path / "drafts.json"
    )
    found: dict[int, dict[str, int]] = {}

    def ask(token: int) -> None:
        body = {"prompt": "hi", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "logit_bias": {str(token): 100}}
        with server.client(60) as client:
            answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == {yes: "a", no: "b"}[token] * 12
        found[token] = answer["duovolt"]

    askers = [threading.Thread(target=ask, args=(token,)) for token in (yes, no)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    # One token, then rounds of three until two are left; and rounds of one, of whose drafts none may go past the end.
    assert (found[yes]["drafts_proposed"], found[yes]["drafts_accepted"]) == (3 * 3 + 1, 3 * 2 + 1)
    assert (found[no]["drafts_proposed"], found[no]["drafts_accepted"]) == (8 * 3 + 2 + 1, 0)
    assert (server.metric("proposed_total"), server.metric("accepted_total")) == (37, 7)


def test_the_server_says_which_model_it_serves(folder: Path, two: Server) -> None:
    conversion = json.loads((folder / "converted" / "duovolt.json").read_text())["conversion_id"]
    for word in (f"conversion={conversion}", "recipe=v100", "backend=reference", "ranks=2", "kv=float32"):
        assert word in two.log
    assert "backend auto: reference, because: " in two.log  # while nothing is loaded yet
    assert two.log.index("because: ") < two.log.index("starts 2 ranks of") < two.log.index("ready on")
    with two.client() as client:
        details = client.get("/v1/models").json()["data"][0]
        status = client.get("/health/ready").json()
    assert details["duovolt"]["conversion_id"] == conversion
    assert details["max_model_len"] == 512
    assert status["ranks"] == 2


def test_seeds_fix_sampled_answers_whatever_runs_beside(two: Server) -> None:
    """A15: the same seed, other seeds, none, with another request in flight."""
    sampled = ASK | {"temperature": 1, "max_tokens": 12}
    first = tokens(two, sampled | {"seed": 7})
    beside = threading.Thread(target=tokens, args=(two, sampled | {"max_tokens": 40}))
    beside.start()
    assert tokens(two, sampled | {"seed": 7}) == first
    beside.join(30)
    assert tokens(two, sampled | {"seed": 8}) != first
    assert tokens(two, sampled) != tokens(two, sampled)


def test_the_queue_ends_where_reading_the_prompt_begins(two: Server) -> None:
    """Of five prompts that nobody has read before: on a busy machine a rank may wait for its turn at any moment."""
    shares = []
    with two.client(60) as client:
        for number in range(5):
            body = {"prompt": f"{number}" + "Hello world " * 120, "max_tokens": 2}
            times = client.post("/v1/completions", json=body).json()["duovolt"]
            assert times["queue_ms"] > 0 and times["cached_tokens"] == 0
            shares.append(times["queue_ms"] / times["prompt_ms"])
    assert sorted(shares)[2] < 0.5, shares


def test_a_conversation_goes_on_from_what_was_kept(start_server: Start, folder: Path, two: Server) -> None:
    """Through chat: the second turn finds the first up to where the template closes the question, and the same words."""
    off = start_server(folder / "ranks-2", "--max-context", "512", "--lanes", "2", "--prefix-cache", "off")
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Hello world, how are you today? " * 4}]
    usage, hits = [], two.metric("cached_prompts_total")
    for _ in range(3):
        body = GREEDY | {"messages": talk, "max_tokens": 8}
        answers = []
        for server in (two, off):
            with server.client(60) as client:
                answers.append(client.post(CHAT, json=body).json())
        first, second = answers
        assert first["choices"][0]["message"] == second["choices"][0]["message"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        usage.append((first["usage"]["prompt_tokens"], first["usage"]["prompt_tokens_details"]["cached_tokens"]))
        assert first["duovolt"]["cached_tokens"] == usage[-1][1]
        talk += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "And now?"}]
    opening = len("assistant\n<think>\n")  # as tokens: no more than characters
    for (before, _), (_, cached) in itertools.pairwise(usage):
        assert before - opening <= cached < before
    assert two.metric("cached_prompts_total") == hits + 2
    assert two.metric("cached_tokens_total") >= usage[1][1] + usage[2][1]
    assert two.metric("prefixes") > 3 and off.metric("prefixes") == 0


def test_echo_scores_the_prompt(two: Server) -> None:
    with two.client(60) as client:
        answer = client.post(
            "/v1/completions", json={"prompt": "Hello world", "max_tokens": 0, "echo": True, "logprobs": 0}
        )
    choice = answer.json()["choices"][0]
    assert choice["text"] == "Hello world"
    assert choice["logprobs"]["tokens"] == ["Hello", " world"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1] < 0
    # The token that stands there is told beside the likeliest, however unlikely it is.
    assert choice["logprobs"]["top_logprobs"] == [None, {" world": choice["logprobs"]["token_logprobs"][1]}]
    assert answer.json()["usage"]["total_tokens"] == answer.json()["usage"]["prompt_tokens"] == 2


def test_the_last_token_of_a_scored_prompt_may_be_a_chunk_of_its_own(
    start_server: Start, folder: Path, two: Server
) -> None:
    """Nothing follows it, so it scores nothing: ranks that share the head then have no rows to gather."""
    short = start_server(folder / "ranks-2", "--max-context", "512", "--prefill-chunk", "64")

    def scores(server: Server, count: int) -> list[float | None]:
        ask = {"prompt": [5] * count, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        with server.client(60) as client:
            answer = client.post("/v1/completions", json=ask)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["logprobs"]["token_logprobs"])

    assert len(scores(two, 1)) == 2
    cut, whole = scores(short, 65), scores(two, 65)
    assert cut[0] is None and len(cut) == 66
    assert cut[1:] == pytest.approx(whole[1:], abs=1e-4)


def test_a_fault_between_real_ranks_ends_the_answer_and_the_ranks_come_back(start_server: Start, folder: Path) -> None:
    """The patience of a rank, half of the watchdog's, is far beyond what a busy machine lets a rank wait for its twin."""
    fault = {"DUOVOLT_MAILBOX_FAULT": "1:60:stale"}
    server = start_server(folder / "ranks-2", "--max-context", "512", "--watchdog-seconds", "12", **fault)
    with server.client(60) as client:
        broken = client.post(CHAT, json=GREEDY)
    assert broken.status_code == 503
    assert "no answer from rank 1 at mailbox step 60 within 6 s" in broken.json()["error"]["message"]
    server.wait_log("ready on", count=2)
    assert len(tokens(server, GREEDY)) == 24


@pytest.mark.parametrize("case", ["swapped", "mixed weights", "converted", "truncated", "configured"])
def test_directories_that_are_not_what_their_names_say_are_refused(
    start_server: Start, folder: Path, tmp_path: Path, case: str
) -> None:
    """L09: a configuration of its own would leave the weights as they are and spoil one rank's half of every sum."""
    ranks = tmp_path / "ranks"
    shutil.copytree(folder / "ranks-2", ranks)
    first, second = ranks / "rank-0-of-2", ranks / "rank-1-of-2"
    shard = next(first.glob("*.safetensors")).name
    words = {
        "swapped": "the directories were swapped or renamed",
        "mixed weights": "files of different ranks or conversions were mixed",
        "converted": "not a rank",
        "truncated": shard,
        "configured": "rank-1-of-2: config digest",
    }[case]
    if case == "swapped":
        first.rename(ranks / "x")
        second.rename(first)
        (ranks / "x").rename(second)
    elif case == "mixed weights":
        shutil.copy(second / shard, first / shard)
    elif case == "converted":
        shutil.rmtree(first)
        shutil.copytree(folder / "converted", first)
    elif case == "configured":
        config = json.loads((second / "config.json").read_text())
        config["text_config"]["rms_norm_eps"] = 1e-5
        (second / "config.json").write_text(json.dumps(config))
    else:
        with (first / shard).open("r+b") as file:
            file.truncate(50000)
    server = start_server(ranks, ready=False)
    assert server.wait_exit(20) == 2
    assert words in server.log
    assert len([line for line in server.lines if line.startswith("duovolt")]) == 1
    assert leftovers(server.pid) == []


COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "many": {"enum": [1, 20, 300]}},
           "required": ["colour", "many"], "additionalProperties": False}  # fmt: skip
PAINT = {"name": "paint", "parameters": COLOURS}


def painted(value: str) -> dict:
    found = json.loads(value)
    assert found["colour"] in ("red", "blue") and found["many"] in (1, 20, 300) and len(found) == 2
    return found


def test_answers_of_a_given_form_have_it_whatever_the_model_would_say(two: Server) -> None:
    """Random weights, both ranks, drafts: only the grammar can make sense of it. Through every API."""
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": COLOURS, "strict": True}}
    off = {"temperature": 1, "chat_template_kwargs": {"enable_thinking": False}}
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, **off}
    with two.client(60) as client:

        def post(path: str, body: dict) -> dict:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        found = []
        for seed in range(4):
            (choice,) = post(CHAT, asked | {"response_format": form, "seed": seed})["choices"]
            assert choice["finish_reason"] == "stop"
            found.append(painted(choice["message"]["content"]))
        tool = {"type": "function", "function": PAINT}
        for tool_choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            body = asked | {"tools": [tool], "tool_choice": tool_choice, "parallel_tool_calls": False, "seed": 5}
            (choice,) = post(CHAT, body)["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "paint"
            painted(call["function"]["arguments"])
        text = post("/v1/completions", {"prompt": "x", "max_tokens": 200, "response_format": form, "seed": 1})
        painted(text["choices"][0]["text"])
        body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "paint", "schema": COLOURS}}}
        response = post("/v1/responses", body | {"max_output_tokens": 200, "seed": 2, **off})
        painted(response["output"][-1]["content"][0]["text"])
        body = asked | {
            "tools": [{"name": "paint", "input_schema": COLOURS}],
            "tool_choice": {"type": "any"},
            "seed": 3,
        }
        message = post("/v1/messages", body | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
        assert message["stop_reason"] == "tool_use"
        painted(json.dumps(message["content"][-1]["input"]))
        logged = post(CHAT, asked | {"response_format": form, "seed": 9, "logprobs": True})["choices"][0]["logprobs"]
        assert any(entry["logprob"] < -5 for entry in logged["content"]), (
            "the model's own probabilities, not the grammar's"
        )
