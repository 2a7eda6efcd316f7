"""Streams of every API put together by the rules of their clients, their order checked on the way."""

from __future__ import annotations

import json
from typing import Any


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A Messages stream as the body that it stands for."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    inputs: dict[int, str] = {}
    open_block: int | None = None
    for event in events[2:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert open_block is None and index == len(message["content"])
            open_block = index
            message["content"].append(event["content_block"])
            continue
        assert index == open_block
        block = message["content"][index]
        if kind == "content_block_stop":
            if block["type"] == "thinking":
                assert block["signature"]
            if block["type"] == "tool_use" and message_is_json(inputs.get(index, "")):
                block["input"] = json.loads(inputs[index])
            open_block = None
            continue
        delta = event["delta"]
        match kind, delta["type"]:
            case "content_block_delta", "text_delta":
                block["text"] += delta["text"]
            case "content_block_delta", "thinking_delta":
                assert not block["signature"]
                block["thinking"] += delta["thinking"]
            case "content_block_delta", "signature_delta":
                block["signature"] = delta["signature"]
            case "content_block_delta", "input_json_delta":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            case _:
                raise AssertionError(event)
    assert open_block is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    last = events[-2]
    return message | last["delta"] | {"usage": message["usage"] | last["usage"], "duovolt": last["duovolt"]}


def message_is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A Responses stream's last response, which the items, parts and deltas before it must add up to."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text, logprobs, done = "", [], True
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert done and event["output_index"] == len(items)
            items.append(event["item"])
            text, logprobs, done = "", [], False
            continue
        assert event["output_index"] == len(items) - 1 and not done
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            items[-1], done = event["item"], True
            continue
        assert event["item_id"] == item["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text and event["name"] == item["name"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text and event.get("logprobs", [])[: len(logprobs)] == logprobs
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        else:
            assert kind == "content_part.added" and event["part"]["text"] == ""
    assert done
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return last["response"]
