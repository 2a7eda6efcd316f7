"""Graders on fixed answers, our own questions against right and wrong answers, needles, and files that are no questions."""

from pathlib import Path

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.perf.graded.grade import code_of, grade, letter_of
from duovolt.perf.graded.items import DEPTHS, Choice, Code, Text, digest_of, kind_of, needles, read_items

SOLUTIONS = Path(__file__).with_name("solutions.py").read_text()


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("B", "B"),
        ("**C)**", "C"),
        ("First I thought the answer is A. No.\n\nAnswer: **D**", "D"),
        ("the answer is (b).", "B"),
        ("Answer: `a`", "A"),
        ("A is wrong, C is right", None),
        ("Answer: E", None),  # not among four
        ("Answer: Because of that", None),
        ("Some prose.\n\nC.", "C"),
        ("", None),
    ],
)
def test_letters(text: str, letter: str | None) -> None:
    assert letter_of(text, 4) == letter


def test_thoughts_do_not_count() -> None:
    item = Choice("x", "?", ["a", "b"], "B")
    assert grade(item, "<think>Answer: A</think>Answer: B").passed
    assert grade(item, "Answer: A\n</think>\n\nAnswer: B").passed  # the mark that opens was in the prompt
    assert grade(item, "<think>Answer: B").why == "no answer"
    assert grade(item, "Answer: A").why == "said A, not B"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Try\n```\nx = 1\n```\nor better\n```py\nx = 2\n```\ndone", "x = 2\n"),
        ("```bash\nls\n```", None),
        ("x = 1", "x = 1"),
        ("This is prose, no program", None),
        ("```python\nx = 1", None),
    ],
)
def test_code(text: str, code: str | None) -> None:
    assert code_of(text) == code


def test_words_stand_alone() -> None:
    item = Text("x", "?", "48213")
    assert grade(item, "It is 48213.").passed and grade(item, "**48213**").passed
    assert not grade(item, "148213").passed and grade(item, "48 213").why == "not in the answer"


def test_our_questions_are_graded_right() -> None:
    """Every choice by its letter; all code tasks by solutions of our own; an empty solution passes none."""
    items = read_items(None)
    assert 30 <= len(items) == len({digest_of(item) for item in items})
    letters = [item.answer for item in items if isinstance(item, Choice)]
    assert max(letters.count(letter) for letter in "ABCD") <= len(letters) * 0.4  # saying one letter scores little
    for item in items:
        if isinstance(item, Choice):
            assert grade(item, f"Answer: {item.answer}").passed and len(set(item.choices)) == len(item.choices)
    names: dict[str, object] = {}
    exec(SOLUTIONS, names)
    codes = [item for item in items if isinstance(item, Code)]
    assert len(codes) == 10
    for item in codes:
        exec(item.tests, dict(names))
        with pytest.raises(Exception):  # noqa: B017 - any failure will do
            exec(item.tests, {name: (lambda *args: None) for name in names})
    assert grade(codes[0], f"Here:\n```python\n{SOLUTIONS}\n```").passed  # once through the sandbox


def test_needles_are_the_same_everywhere_and_stand_where_they_should() -> None:
    found = list(needles([1024]))
    assert len(found) == 2 * len(DEPTHS) and found == list(needles([1024]))
    for (_, item), depth in zip(found, [*DEPTHS, *DEPTHS], strict=True):
        hay = item.question
        assert hay.count(item.answer) == 1 and kind_of(item) == "text"
        assert abs(hay.index(item.answer) / len(hay) - depth / 100) < 0.17
        assert grade(item, item.answer).passed
    assert 0.7 * 896 * 3.6 < len(found[0][1].question) < 896 * 3.6
    with pytest.raises(InputError, match="at least 512"):
        list(needles([64]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "),
        ('{"kind": "essay", "id": "a"}', "line 1: "),
        (
            '{"kind": "choice", "id": "a", "question": "?", "choices": ["x"], "answer": "A"}',
            "choices: expected 2 to 10",
        ),
        ('{"kind": "choice", "id": "a", "question": "?", "choices": ["x", "y"], "answer": "C"}', "from A to B"),
        ('{"kind": "code", "id": "a", "question": "?", "tests": "def"}', "tests are no Python"),
        ('{"kind": "text", "id": "", "question": "?", "answer": "x"}', "id: expected"),
        ('{"kind": "text", "id": "a", "question": "?", "answer": " "}', "answer is empty"),
        ('{"kind": "text", "id": "a", "question": "?", "answer": "x"}\n' * 2, "line 2: the id 'a' was there before"),
        ('{"kind": "text", "id": "a", "question": "?", "answer": "x", "more": 1}', "line 1: "),
        ("\n", "holds no question"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_what_is_no_question_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(line)
    with pytest.raises(InputError) as caught:
        read_items(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
