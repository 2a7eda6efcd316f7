"""The fields that `foreign` passes over or refuses: what to do instead, as each API names it, and what asks for nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from .schema import Body, ChatBody, CompletionBody, CountTokensBody, MessagesBody, ResponsesBody, TokenizeBody

# For the bill, for tracing, for caches and stores that others keep, or what is always so here.
HARMLESS = frozenset(
    {
        "access_programs", "background_options", "betas", "billing_policy", "cache_control", "diagnostics",
        "fallback_credit_token", "fallbacks", "image", "include", "inference_geo", "max_tool_calls", "metadata", "model",
        "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "speed", "store", "stream", "stream_options", "user", "user_profile_id", "workspace_id",
    }
)  # fmt: skip

# What a rule speaks of, as each API calls it. What an API lacks, the chat API has.
APIS = (ChatBody, CompletionBody, MessagesBody, ResponsesBody)
_SHARED = {"place": "the messages", "tools": "tools", "variables": "chat_template_kwargs"}
_SAMPLED = {
    "length": "max_tokens", "format": "response_format", "bias": "logit_bias", "penalty": "frequency_penalty",
    "repetition": "repetition_penalty", "stop": "stop",
}  # fmt: skip
_WORDS: dict[type[Body], dict[str, str]] = {
    ChatBody: _SHARED | _SAMPLED | {
        "choice": "tool_choice", "parallel": "parallel_tool_calls", "thought": "reasoning_effort or enable_thinking",
        "effort": "reasoning_effort", "output": "response_format or reasoning_effort", "best": "logprobs",
    },
    CompletionBody: _SAMPLED | {"place": "the prompt", "output": "response_format", "best": "logprobs"},
    MessagesBody: _SHARED | {
        "length": "max_tokens", "format": "output_config.format", "stop": "stop_sequences", "choice": "tool_choice",
        "parallel": "tool_choice.disable_parallel_tool_use", "thought": "thinking", "effort": "output_config.effort",
    },
    ResponsesBody: _SHARED | {
        "place": "the input", "length": "max_output_tokens", "format": "text.format", "stop": "stop",
        "choice": "tool_choice", "thought": "reasoning.effort or enable_thinking", "effort": "reasoning.effort",
        "output": "text.format or reasoning.effort", "best": "top_logprobs",
    },
    CountTokensBody: _SHARED,
    TokenizeBody: _SHARED,
}  # fmt: skip


class Rule(NamedTuple):
    """`text` is what to do, with words of `_WORDS` in braces, or why nothing helps; `usual` values ask for nothing."""

    text: str
    usual: tuple[Any, ...]
    helps: bool

    def told(self, kind: type[Body]) -> str:
        """What the client is told who sent the field to the API of `kind`."""
        try:
            text = self.text.format_map(_WORDS[kind])
        except KeyError:
            text = self.text.format_map(_WORDS[ChatBody]) + " to /v1/chat/completions"
        return text + (", or leave it out" if self.helps else "; leave it out")


def _do(text: str, *usual: Any) -> Rule:
    return Rule(text, usual, True)


def _why(text: str, *usual: Any) -> Rule:
    return Rule(text, usual, False)


_FORMAT = _do("say {format}")
_BY_CHAT = "use /v1/chat/completions"

# Fields of the official APIs, then of other servers.
REFUSED: dict[str, Rule] = {
    "audio": _why("this server answers with text"),
    "modalities": _why("this server answers with text", ["text"]),
    "functions": _do("say {tools}"),
    "function_call": _do("say {tools} and {choice}", "auto", "none"),
    "verbosity": _do("ask for it in {place}", "medium"),
    "web_search_options": _why("this server searches nothing"),
    "context_management": _do("this server never edits a prompt: send what shall be read"),
    "container": _why("this server runs no code"),
    "mcp_servers": _do("this server calls nobody: say {tools}"),
    "compaction": _do("this server never edits a prompt: ask for a summary in {place}"),
    "thread": _do("this server keeps no state between requests: send what came before"),
    "add_generation_prompt": _why("a chat prompt always begins the answer", True),
    "add_special_tokens": _why("the template decides", True, False),
    "allowed_token_ids": _FORMAT,
    "bad_words": _do("say {bias}"),
    "chat_template": _do("the model's own is used: for its variables say {variables}"),
    "continue_final_message": _do("an answer begins a turn: use /v1/completions", False),
    "documents": _do("put them into {place}"),
    "dry_multiplier": _do("say {penalty}", 0),
    "dynatemp_range": _do("say temperature", 0),
    "early_stopping": _why("answers are sampled", False),
    "ebnf": _FORMAT,
    "grammar": _FORMAT,
    "guided_choice": _FORMAT,
    "guided_grammar": _FORMAT,
    "guided_json": _FORMAT,
    "guided_regex": _FORMAT,
    "include_stop_str_in_output": _why("stop strings are never part of an answer", False),
    "json_schema": _FORMAT,
    "length_penalty": _why("answers are sampled", 1),
    "logits_processors": _do("say {bias}"),
    "max_new_tokens": _do("say {length}"),
    "min_new_tokens": _do("say ignore_eos with {length}", 0),
    "min_tokens": _do("say ignore_eos with {length}", 0),
    "mirostat": _do("say temperature, top_p, top_k or min_p", 0),
    "n_predict": _do("say {length}", -1),
    "num_predict": _do("say {length}", -1),
    "prompt_logprobs": _do("use /v1/completions with echo and logprobs", False),
    "regex": _FORMAT,
    "repeat_penalty": _do("say {repetition}", 1),
    "skip_special_tokens": _why("they are never part of an answer", True),
    "spaces_between_special_tokens": _why("they are never part of an answer", True, False),
    "structural_tag": _FORMAT,
    "structured_outputs": _FORMAT,
    "tfs_z": _do("say top_p or min_p", 1),
    "top_a": _do("say min_p", 0),
    "truncate_prompt_tokens": _why("this server never cuts a prompt", -1),
    "typical_p": _do("say top_p or min_p", 1),
    "use_beam_search": _why("answers are sampled", False),
    "xtc_probability": _do("say temperature, top_p, top_k or min_p", 0),
}

# What one API here knows and another does not.
ELSEWHERE: dict[str, Rule] = {
    "background": _why("the answer comes with the request, streamed or whole", False),
    "best_of": _why("every answer that is made is given", 1),
    "echo": _do("use /v1/completions", False),
    "enable_thinking": _do("say {thought}"),
    "frequency_penalty": _do(_BY_CHAT, 0),
    "logprobs": _do("say {best}", False),
    "max_completion_tokens": _do("say {length}"),
    "max_output_tokens": _do("say {length}"),
    "max_tokens": _do("say {length}"),
    "messages": _do("use /v1/chat/completions or /v1/messages"),
    "n": _do("use /v1/chat/completions, or ask again", 1),
    "output_config": _do("say {output}"),
    "parallel_tool_calls": _do("say {parallel}", True),
    "presence_penalty": _do(_BY_CHAT, 0),
    "prompt": _do("use /v1/completions"),
    "reasoning": _do("say {thought}"),
    "reasoning_effort": _do("say {effort}"),
    "repetition_penalty": _do(_BY_CHAT, 1),
    "response_format": _do("say {format}", {"type": "text"}),
    "stop": _do("say {stop}"),
    "stop_sequences": _do("say {stop}"),
    "suffix": _why("no API of this server has it"),
    "system": _do("send it as a message of the role system"),
    "text": _do("say {format}", {"format": {"type": "text"}}),
    "thinking": _do("say {thought}"),
    "tool_choice": _do(_BY_CHAT, "auto", "none"),
    "tools": _do(_BY_CHAT),
    "top_logprobs": _do("say {best}", 0),
    "truncation": _why("this server never cuts a prompt", "disabled"),
}
UNKNOWN = _why("this API has no such field")

# Where an API has its own way.
OWN_WAYS: dict[type[Body], dict[str, Rule]] = {
    CompletionBody: {
        "add_special_tokens": _why("nothing is added to a prompt", True, False),
        "continue_final_message": _why("a prompt is always continued", True, False),
        "n_predict": _do("say {length}"),  # without it there are 16 tokens, not as many as fit
        "num_predict": _do("say {length}"),
        "prompt_logprobs": _do("say echo and logprobs", False),
        "system": _do("put it into {place}"),
    },
    ResponsesBody: {"system": _do("say instructions"), "messages": _do("say input")},
    TokenizeBody: {
        "continue_final_message": _do("say prompt", False),
        "enable_thinking": _do("say it in {variables}"),
        "reasoning_effort": _do("say it in {variables}"),
    },
}

# An empty object of these asks for something: for a search; for any JSON.
EMPTY_ASKS = frozenset({"web_search_options", "guided_json", "json_schema"})
# Names of the answer's length: one that is not read may repeat one that is.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
