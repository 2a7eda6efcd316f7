"""Grade an answer. Only the text counts: the same text gets the same grade everywhere."""

import re
from dataclasses import dataclass

from .items import LETTERS, Choice, Code, Item
from .sandbox import run_code

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_SAID = re.compile(r"\banswer\b(?:\s+is)?[\s:*`_(]*([A-Ja-j])\b(?!')", re.IGNORECASE)
_ALONE = re.compile(r"[\s*`_(\[]*([A-Ja-j])[\s*`_)\].:]*")
_FENCE = re.compile(r"^```[ \t]*([A-Za-z0-9+#.-]*)[ \t]*\r?\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True)
class Grade:
    """`why`: what was found in its place, or what went wrong; empty if it passed."""

    passed: bool
    why: str


def grade(item: Item, answer: str) -> Grade:
    """`answer`: what the model said, with or without its thoughts between marks."""
    text = _THOUGHT.sub("", answer).rpartition("</think>")[2].strip()
    if not text:
        return Grade(False, "no answer")
    if isinstance(item, Choice):
        letter = letter_of(text, len(item.choices))
        if letter == item.answer:
            return Grade(True, "")
        return Grade(False, "no letter" if letter is None else f"said {letter}, not {item.answer}")
    if isinstance(item, Code):
        code = code_of(text)
        if code is None:
            return Grade(False, "no code block")
        ran = run_code(code, item.tests)
        return Grade(ran.passed, ran.why)
    wanted = rf"(?<!\w){re.escape(item.answer.strip())}(?!\w)"
    found = re.search(wanted, text, re.IGNORECASE) is not None
    return Grade(found, "" if found else "not in the answer")


def letter_of(text: str, choices: int) -> str | None:
    """The last letter that the text calls its answer; else a line that is a letter and nothing more, the last first."""
    allowed = LETTERS[:choices]
    said = [match[1].upper() for match in _SAID.finditer(text)]
    alone = [match[1].upper() for line in text.splitlines() if (match := _ALONE.fullmatch(line))]
    return next((letter for letter in (*reversed(said), *reversed(alone)) if letter in allowed), None)


def code_of(text: str) -> str | None:
    """The last block of Python; a text without blocks if it is a program."""
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in _PYTHON]
    if blocks:
        return str(blocks[-1])
    if "```" in text:
        return None
    try:
        compile(text, "answer", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text
