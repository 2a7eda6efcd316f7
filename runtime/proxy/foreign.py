"""Fields that other servers know and this one does not honour: those that do no harm, and those that are refused.

A body's own fields are in `schema`. Of the others, a field changes the answer (and is refused, with its name and what to
do), or it does not (and is passed over, as `docs/serve.md` lists), or nobody here has heard of it (and it is passed over).
Refused is only what asks for something: null, empty values and the value that means the usual thing do not. What to do instead
is said in the names of the API that was asked: `foreign_fields` has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import bad_request
from .foreign_fields import APIS, ELSEWHERE, EMPTY_ASKS, HARMLESS, LENGTHS, OWN_WAYS, REFUSED, UNKNOWN, Rule
from .schema import Body, CountTokensBody, TokenizeBody, decode_json

Rules = Mapping[str, Rule]


def _foreign_to(kind: type[Body]) -> Rules:
    own = frozenset(kind.__struct_fields__)
    known = {name for api in APIS for name in api.__struct_fields__}
    found = {name: ELSEWHERE.get(name, UNKNOWN) for name in known - own - HARMLESS} | REFUSED | OWN_WAYS.get(kind, {})
    return {name: rule for name, rule in found.items() if name not in own}


_OF_A_PROMPT = ("container", "context_management", "mcp_servers", "thread")  # all that a count depends on
_OF_A_TEXT = ("add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message", "documents")
_LEAST = ("min_tokens", "min_new_tokens")
RULES: dict[type[Body], Rules] = {kind: _foreign_to(kind) for kind in APIS}
RULES[TokenizeBody] = {name: REFUSED[name] for name in _OF_A_TEXT} | OWN_WAYS[TokenizeBody]
RULES[CountTokensBody] = {name: REFUSED[name] for name in _OF_A_PROMPT}


def refuse_unheeded(raw: bytes, body: Body) -> None:
    """Raises ApiError (400) for a field of `raw`, of which `body` is what is read, that asks for what nobody would heed."""
    rules = RULES.get(type(body))
    if rules is None:
        return
    granted = _LEAST if getattr(body, "ignore_eos", None) else ()  # an answer that no end of text ends is long enough
    for name, text in decode_json(raw, dict[str, msgspec.Raw]).items():
        if name not in rules or name in granted:
            continue
        value = decode_json(text, Any, name)
        if not (_asks_nothing(name, value, rules[name].usual) or _says_it_again(name, value, body)):
            raise bad_request(f"{name} is not honoured here: {rules[name].told(type(body))}", name)


def _asks_nothing(name: str, value: Any, usual: tuple[Any, ...]) -> bool:
    """True for null, for what is empty, and for what would be so without the field. To JSON, `true` is not 1."""
    if value is None or value in ("", []) or (value == {} and name not in EMPTY_ASKS):
        return True
    if name == "context_management":
        return _keeps_all(value)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual)


def _says_it_again(name: str, value: Any, body: Body) -> bool:
    """True for the answer's length by another name, where the body says the same length by a name that is read."""
    said = [getattr(body, length, None) for length in LENGTHS]
    return name in LENGTHS and isinstance(value, int) and not isinstance(value, bool) and value in said


def _keeps_all(value: Any) -> bool:
    """Anthropic's clients say so where thoughts, or nothing at all, shall be edited out of no message."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
