"""Documentation to plain text, facts, and dialogues."""

import random

from duovolt.tiny.corpus import Document, known_words, split, without_echoes
from duovolt.tiny.dialogs import dialogues, statement, third_person, tool_dialogue
from duovolt.tiny.facts import Fact, first_sentences
from duovolt.tiny.rst import RstText
from duovolt.tiny.text import HtmlText, python_docstrings

RST = """\
.. _label:

=====
Title
=====

.. module:: things
   :synopsis: Work with things.

Some *emphasised* words about :func:`~things.make` and ``x = 1``,
on two lines, with :meth:`__init__` and :attr:`__name__`.

.. function:: make(size, *, name=None)
              make(other)

   Return a new thing.  It has a :ref:`size <sizes>`.

   .. versionadded:: 3.4
      The *name* argument.

   Example::

       >>> make(3)
       thing(3)

.. toctree::

   hidden

.. class:: Thing

   A thing.

   .. method:: grow(by)

      Make it larger.

.. glossary::

   atom
      The smallest thing.
"""


def test_rst_becomes_plain_paragraphs():
    assert RstText(RST).paragraphs == [
        "# Title",
        "`things`: Work with things.",
        "Some emphasised words about `things.make` and `x = 1`, on two lines, with `__init__` and `__name__`.",
        "`make(size, *, name=None)` or `make(other)`",
        "Return a new thing. It has a `size`.",
        "New in version 3.4: The name argument.",
        "Example:",
        "    >>> make(3)\n    thing(3)",
        "`Thing`",
        "A thing.",
        "`grow(by)`",
        "Make it larger.",
        "atom: The smallest thing.",
    ]


def test_rst_facts():
    assert RstText(RST).facts == [
        Fact("module", "things", "things", "Work with things."),
        Fact("function", "things.make", "make(size, *, name=None)", "Return a new thing. It has a `size`."),
        Fact("class", "things.Thing", "Thing", "A thing."),
        Fact("method", "things.Thing.grow", "grow(by)", "Make it larger."),
        Fact("term", "atom", "atom", "The smallest thing."),
    ]


def test_html_keeps_prose_and_code_and_drops_navigation():
    page = (
        "<head><title>t</title></head><body><div class='related'>home <div>x</div></div><h1>Top¶</h1><p>One "
        "<code>two</code>\n three &amp; four.</p><ul><li>item</li></ul><pre>a = 1\n  b</pre>"
        "<table><tr><td>1</td></tr></table></body>"
    )
    assert HtmlText(page).paragraphs == ["# Top", "One `two` three & four.", "- item", "    a = 1\n      b"]


def test_docstrings_of_a_module():
    source = (
        '"""Small tools, for tests."""\ndef pick(a, b=1):\n    """Pick one of the two values."""\nclass Box:\n'
        '    """A box that holds things."""\n    def put(self, x):\n        """Put one thing in."""\n    def _no(self):\n'
        '        """Private, thus left out."""\n'
    )
    text, facts = python_docstrings(source, "tools")
    assert text == (
        "# tools\n\nSmall tools, for tests.\n\n`pick(a, b=1)`\n\nPick one of the two values.\n\n`class Box`\n\n"
        "A box that holds things.\n\n`Box.put(x)`\n\nPut one thing in."
    )
    assert [(f.kind, f.name) for f in facts] == [
        ("module", "tools"),
        ("function", "tools.pick"),
        ("class", "tools.Box"),
        ("method", "tools.Box.put"),
    ]


def test_first_sentences_end_whole():
    assert first_sentences("One two. Three four. Five.", 20) == "One two. Three four."
    assert first_sentences("Use `a.b` here. (See there.) More", 40) == "Use `a.b` here. (See there.) More."
    assert first_sentences("A long sentence that does not fit.", 10) == ""


def test_statements_speak_in_the_third_person():
    assert third_person("Copy the file and return its name.") == "copies the file and returns its name."
    assert third_person("Search here.") == "searches here."
    assert third_person("Display it.") == "displays it."
    assert third_person("The thing.") is None
    fact = Fact("function", "len", "len(s)", "Return the length of s.")
    assert statement(fact, "len") == "The `len` function returns the length of s."
    assert statement(Fact("term", "atom", "atom", "The smallest thing."), "atom") == "Atom: The smallest thing."


def test_dialogues_repeat_for_a_seed_and_alternate_roles():
    facts = [
        (
            Fact("function", f"make{i}", f"make{i}(x)", f"Return thing number {i}."),
            "python3.11/library/functions.rst.txt",
        )
        for i in range(9)
    ]
    made = list(dialogues(facts, 200, seed=4))
    assert made == list(dialogues(facts, 200, seed=4)) and made != list(dialogues(facts, 200, seed=5))
    for messages, _ in made:
        roles = [m["role"] for m in messages]
        assert roles[-1] == "assistant" and "user" in roles[:2]
        assert all(
            roles[at + 1]
            in {"system": ("user",), "user": ("assistant",), "tool": ("tool", "assistant")}.get(role, ("user", "tool"))
            for at, role in enumerate(roles[:-1])
        )


def test_tool_dialogue_calls_an_offered_tool_and_answers_with_its_result():
    draw, facts = random.Random(2), [(Fact("function", "len", "len(s)", "Return the length of s."), "len")]
    for _ in range(50):
        messages, tools = tool_dialogue(draw, facts)
        calls = [call["function"] for call in messages[1]["tool_calls"]]
        results = [m["content"] for m in messages if m["role"] == "tool"]
        assert len(calls) == len(results)
        assert {c["name"] for c in calls} <= {tool["function"]["name"] for tool in tools}
        if calls[0]["name"] == "calculate":
            assert eval(calls[0]["arguments"]["expression"]) == int(results[0])


def test_heldout_documents_share_nothing_with_the_training_documents():
    words = [f"w{i}" for i in range(4000)]

    def prose(start):
        return "\n\n".join(" ".join(words[at : at + 25]) for at in range(start, start + 600, 25))

    echo = " ".join(words[650:680])  # a run of words of another document inside a longer paragraph
    documents = [Document(f"d{i}", prose(i * 650) + "\n\n" + echo + f" and more of d{i}") for i in range(5)]
    documents[1].text += "\n\n" + documents[0].text.split("\n\n")[3]
    training, held = split(documents)
    assert sorted(d.name for d in training + held) == [f"d{i}" for i in range(5)] and held
    for document in without_echoes(held[:1], training + held[1:]):
        assert len(document.text) > 500 and echo not in document.text
        for other in training + held[1:]:
            assert not set(document.text.split("\n\n")) & set(other.text.split("\n\n"))


def test_known_words_are_frequent_plain_words():
    text = "apple pie, apple_sauce APPLE apples " * 12 + "rare " * 11
    assert known_words([Document("d", text)]) == ["a", "apple", "apples", "i", "pie"]
