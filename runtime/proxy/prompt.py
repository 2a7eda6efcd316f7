"""The text of a prompt to its ids, refused before the work where the context could never hold it."""

from __future__ import annotations

from .errors import bad_request
from .tokenizer import TextTokenizer


def encode_prompt(tokenizer: TextTokenizer, text: str, max_context: int) -> list[int]:
    """Ids of `text`. Raises ApiError (400) for a text that no `max_context` tokens can spell, and for lone surrogates."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise bad_request(
            f"the prompt holds U+{ord(text[error.start]):04X} at character {error.start}: half of a surrogate pair, "
            "which is no character",
            "prompt",
        ) from error
    most = tokenizer.most_bytes_per_token
    if most is not None and size > most * max_context:
        raise bad_request(
            f"this model's context is {max_context} tokens; the prompt has {size} bytes of text, and no token stands "
            f"for more than {most}",
            "prompt",
            "context_length_exceeded",
        )
    return tokenizer.encode(text)
