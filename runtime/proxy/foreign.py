"""Fields that other servers know and this one does not honour: those that do no harm, and those that are refused.

A body's own fields are in `schema`. Of the others, a field changes the answer (and is refused, with its name and what to
do), or it does not (and is passed over, as `docs/serve.md` lists), or nobody here has heard of it (and it is passed over).
Refused is only what asks for something: null, empty values and the value that means the usual thing do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import bad_request
from .schema import (
    Body,
    ChatBody,
    CompletionBody,
    CountTokensBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    decode_json,
)

# For the bill, for tracing, for caches and stores that others keep, or what is always so here.
HARMLESS = frozenset(
    {
        "access_programs", "background_options", "betas", "billing_policy", "cache_control", "diagnostics",
        "fallback_credit_token", "fallbacks", "image", "include", "inference_geo", "max_tool_calls", "metadata", "model",
        "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "speed", "store", "stream", "stream_options", "user", "user_profile_id", "workspace_id",
    }
)  # fmt: skip

# Name -> what to do, and the values that ask for nothing. Fields of the official APIs, then of other servers.
_THOUGHT = "say reasoning_effort or enable_thinking"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "audio": ("this server answers with text", ()),
    "modalities": ("this server answers with text", (["text"],)),
    "functions": ("say tools", ()),
    "function_call": ("say tools and tool_choice", ("auto", "none")),
    "verbosity": ("ask for it in the messages", ("medium",)),
    "web_search_options": ("this server searches nothing", ()),
    "context_management": ("this server never edits a prompt: send the messages that shall be read", ()),
    "container": ("this server runs no code", ()),
    "mcp_servers": ("this server calls nobody: offer the tools as tools", ()),
    "compaction": ("this server never edits a prompt: ask for a summary in the messages", ()),
    "thread": ("this server keeps no state between requests: send the earlier messages", ()),
    "add_generation_prompt": ("a chat prompt always begins the answer", (True,)),
    "add_special_tokens": ("the template decides", (True, False)),
    "allowed_token_ids": ("say response_format", ()),
    "bad_words": ("say logit_bias", ()),
    "chat_template": ("the model's own is used; chat_template_kwargs sets its variables", ()),
    "continue_final_message": ("an answer begins a turn: use /v1/completions", (False,)),
    "documents": ("put them into the messages", ()),
    "dry_multiplier": ("say frequency_penalty", (0,)),
    "dynatemp_range": ("say temperature", (0,)),
    "early_stopping": ("answers are sampled", (False,)),
    "ebnf": ("say response_format", ()),
    "grammar": ("say response_format", ()),
    "guided_choice": ("say response_format", ()),
    "guided_grammar": ("say response_format", ()),
    "guided_json": ("say response_format", ()),
    "guided_regex": ("say response_format", ()),
    "include_stop_str_in_output": ("stop strings are never part of an answer", (False,)),
    "json_schema": ("say response_format", ()),
    "length_penalty": ("answers are sampled", (1,)),
    "logits_processors": ("say logit_bias", ()),
    "max_new_tokens": ("say max_tokens", ()),
    "min_new_tokens": ("say ignore_eos with max_tokens", (0,)),
    "min_tokens": ("say ignore_eos with max_tokens", (0,)),
    "mirostat": ("say temperature, top_p, top_k or min_p", (0,)),
    "n_predict": ("say max_tokens", (-1,)),
    "num_predict": ("say max_tokens", (-1,)),
    "prompt_logprobs": ("use /v1/completions with echo and logprobs", (0, False)),
    "regex": ("say response_format", ()),
    "repeat_penalty": ("say repetition_penalty", (1,)),
    "skip_special_tokens": ("they are never part of an answer", (True,)),
    "spaces_between_special_tokens": ("they are never part of an answer", (True, False)),
    "structural_tag": ("say response_format", ()),
    "structured_outputs": ("say response_format", ()),
    "tfs_z": ("say top_p or min_p", (1,)),
    "top_a": ("say min_p", (0,)),
    "truncate_prompt_tokens": ("this server never cuts a prompt", (-1,)),
    "typical_p": ("say top_p or min_p", (1,)),
    "use_beam_search": ("answers are sampled", (False,)),
    "xtc_probability": ("say temperature, top_p, top_k or min_p", (0,)),
}

# What one API here knows and another does not: what to do there, and the values that ask for nothing.
_APIS = (ChatBody, CompletionBody, MessagesBody, ResponsesBody)
_ELSEWHERE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "background": ("the answer comes with the request, streamed or whole", (False,)),
    "best_of": ("every answer that is made is given: use n", (1,)),
    "echo": ("use /v1/completions", (False,)),
    "enable_thinking": ("say thinking", ()),
    "frequency_penalty": ("use /v1/chat/completions", (0,)),
    "logprobs": ("use /v1/chat/completions", (False,)),
    "max_completion_tokens": ("say max_tokens, or max_output_tokens to /v1/responses", ()),
    "max_output_tokens": ("say max_tokens", ()),
    "max_tokens": ("say max_output_tokens", ()),
    "messages": ("use /v1/chat/completions or /v1/messages", ()),
    "n": ("use /v1/chat/completions, or ask again", (1,)),
    "output_config": ("say response_format and reasoning_effort", ()),
    "parallel_tool_calls": ("say tool_choice.disable_parallel_tool_use", (True,)),
    "presence_penalty": ("use /v1/chat/completions", (0,)),
    "prompt": ("use /v1/completions", ()),
    "reasoning": (_THOUGHT, ()),
    "reasoning_effort": ("say reasoning.effort, or output_config.effort to /v1/messages", ()),
    "repetition_penalty": ("use /v1/chat/completions", (1,)),
    "response_format": ("say text.format, or output_config.format to /v1/messages", ({"type": "text"},)),
    "stop": ("say stop_sequences", ()),
    "stop_sequences": ("say stop", ()),
    "suffix": ("no API of this server has it", ()),
    "system": ("send it as a message of the role system", ()),
    "text": ("say response_format", ({"format": {"type": "text"}},)),
    "thinking": (_THOUGHT, ()),
    "tool_choice": ("use /v1/chat/completions", ("auto", "none")),
    "top_logprobs": ("say logprobs", (0,)),
    "truncation": ("this server never cuts a prompt", ("disabled",)),
}


Rules = Mapping[str, tuple[str, tuple[Any, ...]]]


def _foreign_to(kind: type[Body]) -> Rules:
    own = frozenset(kind.__struct_fields__)
    known = {name for api in _APIS for name in api.__struct_fields__}
    usual = ("this API has no such field", ())
    found = {name: _ELSEWHERE.get(name, usual) for name in known - own - HARMLESS} | REFUSED
    return {name: rule for name, rule in found.items() if name not in own}


_OF_A_PROMPT = ("container", "context_management", "mcp_servers", "thread")  # all that a count depends on
_OF_A_TEXT = ("add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message", "documents")
_LEAST = ("min_tokens", "min_new_tokens")
_RULES: dict[type[Body], Rules] = {kind: _foreign_to(kind) for kind in _APIS}
_RULES[TokenizeBody] = {name: REFUSED[name] for name in _OF_A_TEXT} | {
    name: ("say it in chat_template_kwargs", ()) for name in ("enable_thinking", "reasoning_effort")
}
_RULES[CountTokensBody] = {name: REFUSED[name] for name in _OF_A_PROMPT}


def refuse_unheeded(raw: bytes, body: Body) -> None:
    """Raises ApiError (400) for a field of `raw`, of which `body` is what is read, that asks for what nobody would heed."""
    rules = _RULES.get(type(body))
    if rules is None:
        return
    granted = _LEAST if getattr(body, "ignore_eos", None) else ()  # an answer that no end of text ends is long enough
    for name, text in decode_json(raw, dict[str, msgspec.Raw]).items():
        if name not in rules or name in granted:
            continue
        advice, usual = rules[name]
        value = decode_json(text, Any, name)
        if not _asks_nothing(name, value, usual):
            raise bad_request(f"{name} is not honoured here: {advice}, or leave it out", name)


def _asks_nothing(name: str, value: Any, usual: tuple[Any, ...]) -> bool:
    """True for null, for what is empty, and for what would be so without the field. To JSON, `true` is not 1."""
    if value is None or value in ("", [], {}):
        return True
    if name == "context_management":
        return _keeps_all(value)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual)


def _keeps_all(value: Any) -> bool:
    """Anthropic's clients say so where thoughts, or nothing at all, shall be edited out of no message."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
