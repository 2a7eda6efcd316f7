"""Where the next prompt of a conversation will part from the present one: the places at which to keep the state.

The template says so itself. Its text without the opening of the answer ends where every next turn still agrees. Where it
leaves out of earlier turns what it shows of the present one (reasoning between tool calls), the text of an imagined next
turn parts sooner.
"""

from __future__ import annotations

from typing import Any

from .errors import ApiError
from .template import ChatTemplate
from .tokenizer import TextTokenizer

_ANSWER = {"role": "assistant", "content": "x"}
_QUESTION = {"role": "user", "content": "x"}


def shared_ends(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
    text: str,
) -> list[int]:
    """Characters of the prompt `text` that later prompts will begin with: at most two places, neither 0 nor its end.

    Both are where a turn begins. A template that renders no such text gives none.
    """
    try:
        closed = template.render(messages, tools, variables, opens=False)
        later = template.render([*messages, _ANSWER, _QUESTION], tools, variables)
    except ApiError:  # it refuses the imagined turn, which nobody asked for
        return []
    if not text.startswith(closed):
        return []
    ends = {len(closed)}
    shared = common_length(text, later)
    opening = text[len(closed) :].partition(">")  # "<|im_start|>" and what follows
    if shared < len(closed) and opening[1]:
        ends.add(text.rfind(opening[0] + opening[1], 0, shared))
    return sorted(end for end in ends if 0 < end < len(text))


def common_length(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: texts are long, and comparing slices is fast
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def token_ends(tokenizer: TextTokenizer, text: str, ids: list[int], ends: list[int]) -> list[int]:
    """Those of the places (characters of `text`, whose tokens are `ids`) at which a token ends, as counts of tokens."""
    found = []
    for end in ends:
        rest = tokenizer.encode(text[end:])
        if 0 < len(rest) < len(ids) and ids[len(ids) - len(rest) :] == rest:
            found.append(len(ids) - len(rest))
    return found
