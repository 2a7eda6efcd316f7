"""Questions: choices, code tasks, and needles in a haystack. Read from JSON lines, ours or a user's; needles are made.

A line: {"kind": "choice", "id", "question", "choices": [2 to 10], "answer": a letter}, {"kind": "code", "id", "question",
"tests": Python that raises if the answer is wrong} or {"kind": "text", "id", "question", "answer": what must be in it}.
"""

import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import msgspec

from ...checkpoint.digest import digest_bytes
from ...checkpoint.errors import InputError, one_line
from .. import materials

MAX_BYTES = 64 << 20
KINDS = ("choice", "code", "text", "needle")
DEPTHS = (10, 50, 90)  # percent of the text before the needle
LETTERS = "ABCDEFGHIJ"
# Characters a token, less more than a tenth (docs/bench-serve.md has what was counted): the context must hold the prompt.
_CHARACTERS = {"code": 3.2, "chinese": 1.2}
_BESIDE = 128  # tokens of the question and of the chat template
_LETTER_RULE = "Think as long as you need. The last line of your answer must be `Answer: X`, X being the letter."
_CODE_RULE = (
    "Give the whole program in one Python code block. Use the standard library only; no input, no files, no output."
)


class Choice(msgspec.Struct, frozen=True, tag_field="kind", tag="choice", forbid_unknown_fields=True):
    """Graded by its letter."""

    id: str
    question: str
    choices: list[str]
    answer: str

    def prompt(self) -> str:
        listed = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, self.choices, strict=False))
        return f"{self.question}\n\n{listed}\n\n{_LETTER_RULE}"


class Code(msgspec.Struct, frozen=True, tag_field="kind", tag="code", forbid_unknown_fields=True):
    """Graded by tests that run after the answer's code, in its names."""

    id: str
    question: str
    tests: str

    def prompt(self) -> str:
        return f"{self.question}\n\n{_CODE_RULE}"


class Text(msgspec.Struct, frozen=True, tag_field="kind", tag="text", forbid_unknown_fields=True):
    """Graded by a word or number that must stand in the answer."""

    id: str
    question: str
    answer: str

    def prompt(self) -> str:
        return self.question


Item = Choice | Code | Text
_LINE: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Choice | Code | Text)


def kind_of(item: Item) -> str:
    """One of KINDS; a needle is a text of our own making."""
    return "choice" if isinstance(item, Choice) else "code" if isinstance(item, Code) else "text"


def digest_of(item: Item) -> str:
    """Of everything that decides its prompt and its grade."""
    return digest_bytes(msgspec.json.encode(item))[:16]


def read_items(path: Path | None) -> list[Item]:
    """The items of a file, or ours. Raises InputError with the line's number."""
    try:
        source = resources.files(__package__) / "items.jsonl" if path is None else path
        with source.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"--items {path}: {error.strerror or error}.") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"--items {path}: more than {MAX_BYTES >> 20} MB, too many questions for one run.")
    found: list[Item] = []
    known: set[str] = set()
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InputError(f"--items {path}: line {number}: {one_line(error)}.") from None
        if fault := _fault(item) or (f"the id {item.id!r} was there before" if item.id in known else ""):
            raise InputError(f"--items {path}: line {number}: {fault}.")
        known.add(item.id)
        found.append(item)
    if not found:
        raise InputError(f"--items {path}: holds no question.")
    return found


def _fault(item: Item) -> str:
    if not 1 <= len(item.id) <= 80 or not item.id.isprintable():
        return "id: expected 1 to 80 printable characters"
    if not item.question.strip():
        return "question is empty"
    if isinstance(item, Choice):
        if not 2 <= len(item.choices) <= len(LETTERS):
            return f"choices: expected 2 to {len(LETTERS)}"
        if len(item.answer) != 1 or item.answer not in LETTERS[: len(item.choices)]:
            return f"answer: expected a letter from A to {LETTERS[len(item.choices) - 1]}"
    if isinstance(item, Text) and not item.answer.strip():
        return "answer is empty"
    if isinstance(item, Code):
        try:
            compile(item.tests, "tests", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"tests are no Python: {one_line(error)}"
    return ""


def needles(contexts: list[int]) -> Iterator[tuple[int, Text]]:
    """(context, item): for every context, material and depth a sentence with a number of five digits, hidden in the text.

    A context is in tokens and counts question and text; characters are reckoned from the family's tokenizer, so that the
    same context is the same prompt on every server. Raises InputError for one with no room.
    """
    for context in contexts:
        for material in materials.MATERIALS:
            for depth in DEPTHS:
                yield context, _needle(context, material, depth)


def _needle(context: int, material: str, depth: int) -> Text:
    room = int((context - _BESIDE) * _CHARACTERS[material])
    if room < 400:
        raise InputError(f"--contexts {context}: too short for a needle in a text; at least 512.")
    pick = random.Random(f"needle {context} {material} {depth}")
    number = str(pick.randrange(10_000, 100_000))
    text = materials.text_of(material, room, seed=context + depth)
    while number in text:
        number = str(pick.randrange(10_000, 100_000))
    lines = text.splitlines(keepends=True)
    at, before = 0, 0
    while at < len(lines) and before < len(text) * depth // 100:
        before += len(lines[at])
        at += 1
    sentence = f"# Note: the number of the green locker is {number}.\n"
    hay = "".join([*lines[:at], sentence, *lines[at:]])
    asked = "The text above names the number of the green locker. Which is it? Answer with the number alone."
    return Text(f"needle {context} {material} at {depth}%", f"{hay}\n\n{asked}", number)
