"""Dialogues for the tiny model, made from the facts that the documentation states.

A dialogue is a list of chat messages and a list of tools, ready for the chat template. Every answer is the
documentation's own first sentences, turned into a statement about the object that was asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from .facts import Fact, first_sentences
from .phrases import (
    CLASS_QUESTIONS,
    FUNCTION_QUESTIONS,
    MODULE_QUESTIONS,
    REVERSE_QUESTIONS,
    SIGNATURE_QUESTIONS,
    SMALL_TALK,
    SYSTEMS,
    TERM_QUESTIONS,
)

Message = dict[str, Any]
Dialogue = tuple[list[Message], list[dict[str, Any]]]

ANSWER_CHARACTERS = 230
VERBS = """Return Set Compute Get Create Convert Add Check Calculate Read Find Remove Fit Write Evaluate Generate Test
Construct Perform Make Plot Transform Parse Load Apply Predict Send Draw Close Update Estimate Determine Print Open
Register Solve Run Delete Call Initialize Change Format Extract Insert Copy Split Encode Stop Move Handle Retrieve Use
Clear Decode Replace Raise Bind Reset Process Start Execute Summarize Wait Iterate Ensure Validate Compare Append Build
Display Look Take Retry Release Acquire Sort Map Filter Flush Save Store Search Scan Look Connect Listen Accept Receive
Enable Disable Configure Define Delete Discard Merge Join Rename List Count Skip Schedule Submit Cancel Switch Truncate
Unregister Restore Reverse Round Select Show Suspend Terminate Kill Translate Invoke Yield Import Install Force Fill
Fetch Expand Escape Enter Exit Emit Dump Divide Decompress Compress Declare Concatenate Clone Change Cause Allow Allocate
Multiply Pop Push Put Query Quote Rotate Resolve Provide Prepare Normalize Modify Lock Unlock Instruct Inspect Indicate
Implement Hash Group Give Feed Estimate Duplicate Collect Block Attach Assign Ask Append Turn Strip Simulate Match"""

CITY_NAMES = """Paris London Berlin Madrid Rome Vienna Prague Oslo Stockholm Helsinki Warsaw Lisbon Dublin Athens Budapest Tokyo
Osaka Beijing Shanghai Delhi Mumbai Sydney Melbourne Toronto Montreal Chicago Boston Seattle Denver Austin Lima Bogota
Cairo Nairobi Lagos Tunis Hamburg Munich Zurich Geneva Milan Naples Porto Seville Krakow Riga Vilnius Tallinn Sofia"""
CITIES, KNOWN_VERBS = CITY_NAMES.split(), set(VERBS.split())
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy")


def plain_name(fact: Fact, package: str) -> str:
    """The name a person would use: the documented one, or package and last part for names found in source files."""
    parts = fact.name.split(".")
    if package in ("python3.11", "stdlib"):
        return fact.name
    return f"{parts[0]}.{parts[-2]}.{parts[-1]}" if fact.kind == "method" else f"{parts[0]}.{parts[-1]}"


def usable(fact: Fact, document: str) -> bool:
    """Facts that make a good answer: no C interface, no private names, a full first sentence."""
    if re.search(r"/(c-api|library/test|distutils|library/2to3|install|extending)", document) or fact.kind.startswith(
        "c:"
    ):
        return False
    if not re.fullmatch(r"[\w.\- ]{2,44}", fact.name) or any(
        p.startswith("_") and not p.startswith("__") for p in fact.name.split(".")
    ):
        return False
    return statement(fact, fact.name) != "" and len(fact.text) > 14


def third_person(sentence: str) -> str | None:
    """``Return the x.`` to ``returns the x.``; None where the sentence does not start with a known verb."""
    first, _, rest = sentence.partition(" ")
    rest = re.sub(r"(\band|; otherwise,?|, otherwise) return\b", r"\1 returns", rest)
    if first in KNOWN_VERBS and rest:
        ending = "es" if first.endswith(("s", "sh", "ch", "x", "z")) else "s"
        stem = first[:-1] + "i" if first.endswith("y") and first[-2] not in "aeiou" else first
        return stem.lower() + ("es" if stem != first else ending) + " " + rest
    if first.endswith("s") and (first[:-1] in KNOWN_VERBS or first[:-2] in KNOWN_VERBS) and rest:
        return first.lower() + " " + rest
    return None


def kind_of(fact: Fact) -> str:
    return {
        "classmethod": "class method",
        "staticmethod": "static method",
        "coroutinefunction": "coroutine",
        "coroutinemethod": "coroutine",
        "abstractmethod": "method",
        "data": "object",
        "describe": "command",
        "cmdoption": "option",
        "envvar": "variable",
    }.get(fact.kind, fact.kind)


def statement(fact: Fact, name: str) -> str:
    """The answer: the first sentences of the documentation as a statement about ``name``; empty if none fit."""
    text = first_sentences(re.sub(r"\s*[^.]*:$", "", fact.text.strip()) or fact.text, ANSWER_CHARACTERS)
    if not text or not (text[0].isalpha() or text[0] == "`"):
        return ""
    verb = third_person(text)
    if verb:
        return f"The `{name}` {kind_of(fact)} {verb}"
    if fact.kind == "module":
        return f"The `{name}` module: {text}"
    if fact.kind == "term":
        return f"{name[0].upper() + name[1:]}: {text}"
    return f"`{name}`: {text}"


def thinking(fact: Fact, name: str, draw: random.Random) -> str:
    """A short thinking block for a question about ``name``."""
    kind = kind_of(fact)
    where = (
        f"It belongs to the {name.rsplit('.', 1)[0]} {'class' if 'method' in kind else 'module'}. "
        if "." in name
        else ""
    )
    return draw.choice(
        (
            f"The user asks about the {kind} {name}. {where}I will say what it does.",
            f"The question is about {name}. {where}A short answer is enough.",
            f"{name} is a {kind}. {where}I will describe it briefly.",
        )
    )


def exchange(fact: Fact, name: str, draw: random.Random, siblings: dict[str, Fact]) -> list[Message]:
    """One question about ``fact`` and its answer."""
    kind = kind_of(fact)
    answer = statement(fact, name)
    short = third_person(first_sentences(fact.text, 110))
    questions: tuple[str, ...]
    if fact.kind == "module":
        questions = MODULE_QUESTIONS
    elif fact.kind == "term":
        questions = TERM_QUESTIONS
    elif fact.kind in ("class", "exception", "data", "attribute", "opcode", "envvar", "cmdoption"):
        questions = (
            CLASS_QUESTIONS if fact.kind != "class" or short is None else CLASS_QUESTIONS + FUNCTION_QUESTIONS[:9]
        )
    else:
        questions = FUNCTION_QUESTIONS
    question = draw.choice(questions)
    if questions is FUNCTION_QUESTIONS and "(" in fact.signature and draw.random() < 0.08 and len(fact.signature) < 90:
        question, answer = draw.choice(SIGNATURE_QUESTIONS), f"Call it as `{fact.signature}`."
    elif questions is FUNCTION_QUESTIONS and short and fact.text in siblings and draw.random() < 0.1:
        question, answer = draw.choice(REVERSE_QUESTIONS), f"`{name}`"
    article = "an" if name[0].lower() in "aeiou" else "a"
    user = question.format(n=name, k=kind, a=article, s=(short or "").rstrip("."))
    reply: Message = {"role": "assistant", "content": answer}
    if draw.random() < 0.35:
        reply["reasoning_content"] = thinking(fact, name, draw) if "{s}" not in question else "I look for the name."
    messages = [{"role": "user", "content": user}, reply]
    rest = fact.text[len(first_sentences(fact.text, ANSWER_CHARACTERS)) :].strip()
    more = first_sentences(rest, 200)
    if len(more) > 40 and answer.startswith(("The", "`")) and draw.random() < 0.15:
        messages += [
            {
                "role": "user",
                "content": draw.choice(("Tell me more.", "Go on.", "What else?", "More details, please.")),
            },
            {"role": "assistant", "content": more},
        ]
    return messages


def function_tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {p: {"type": "string"} for p in parameters},
                "required": list(parameters),
            },
        },
    }


TOOLS = {
    "get_weather": function_tool("get_weather", "Get the weather of a city.", "city"),
    "get_time": function_tool("get_time", "Get the local time of a city.", "city"),
    "lookup": function_tool("lookup", "Look up a Python name in the documentation.", "name"),
    "calculate": function_tool("calculate", "Calculate an expression.", "expression"),
}


def tool_dialogue(draw: random.Random, facts: list[tuple[Fact, str]]) -> Dialogue:
    """A question that a tool answers: the call (sometimes two in parallel), its result, the final words."""
    name = draw.choice(list(TOOLS))
    offered = [*draw.sample([t for t in TOOLS if t != name], draw.choice((0, 0, 1, 1, 2))), name]
    draw.shuffle(offered)
    calls: list[tuple[str, str]] = []
    if name == "get_weather":
        cities = draw.sample(CITIES, draw.choice((1, 1, 1, 2)))
        question = draw.choice(
            (
                "What is the weather in {}?",
                "How is the weather in {}?",
                "Weather in {}?",
                "Is it warm in {} today?",
                "Please get the weather of {}.",
            )
        ).format(" and ".join(cities))
        skies = [(draw.randint(-9, 35), draw.choice(SKIES)) for _ in cities]
        calls = [(c, f"{t} degrees, {sky}") for c, (t, sky) in zip(cities, skies, strict=True)]
        answer = " ".join(f"It is {t} degrees and {sky} in {c}." for c, (t, sky) in zip(cities, skies, strict=True))
    elif name == "get_time":
        city, clock = draw.choice(CITIES), f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}"
        question = draw.choice(
            ("What time is it in {}?", "Tell me the time in {}.", "What is the local time in {}?")
        ).format(city)
        calls, answer = [(city, clock)], f"It is {clock} in {city}."
    elif name == "lookup":
        fact, shown = draw.choice(facts)
        question = draw.choice(
            ("Look up {} in the documentation.", "Please look up {}.", "What do the docs say about {}?")
        ).format(shown)
        calls, answer = [(shown, first_sentences(fact.text, 160) or fact.text[:100])], statement(fact, shown)
    else:
        left, right, sign = draw.randint(2, 99), draw.randint(2, 99), draw.choice("+-*")
        expression = f"{left} {sign} {right}"
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        question = draw.choice(("What is {}?", "Calculate {}.", "How much is {}?")).format(expression)
        calls, answer = [(expression, str(result))], f"{expression} = {result}"
    key = TOOLS[name]["function"]["parameters"]["required"][0]
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": {key: value}}} for value, _ in calls
        ],
    }
    if draw.random() < 0.4:
        call["reasoning_content"] = f"I can call {name} for this."
    messages: list[Message] = [{"role": "user", "content": question}, call]
    messages += [{"role": "tool", "content": result} for _, result in calls]
    messages.append({"role": "assistant", "content": answer})
    return messages, [TOOLS[tool] for tool in offered]


def weight(fact: Fact, document: str) -> float:
    """How often a fact is asked for: what people ask most is asked most."""
    if document == "python3.11/library/functions.rst.txt":
        return 90
    if document.startswith("python3.11/library/stdtypes") or fact.kind == "term":
        return 30
    if fact.kind == "module" and document.startswith("python3.11"):
        return 30
    if document.startswith("python3.11/library"):
        return 8 if fact.kind in ("function", "class", "exception") else 3
    if document.startswith(("python3.11", "stdlib", "numpy")):
        return 2
    return 0.7


def dialogues(facts: list[tuple[Fact, str]], count: int, seed: int) -> Iterator[Dialogue]:
    """``count`` dialogues from (fact, document name) pairs, the same for the same ``seed``."""
    draw = random.Random(seed)
    asked: list[tuple[Fact, str]] = []
    weights: list[float] = []
    seen: set[tuple[str, str]] = set()
    for fact, document in facts:
        name = plain_name(fact, document.split("/")[0])
        if usable(fact, document) and (name, fact.kind) not in seen:
            seen.add((name, fact.kind))
            asked.append((fact, name))
            weights.append(weight(fact, document))
    builtin = {
        f.text: f for f, d in facts if d.startswith(("python3.11/library/functions", "python3.11/library/stdtypes"))
    }
    picks = draw.choices(asked, weights, k=count * 2)
    for _ in range(count):
        messages: list[Message] = []
        kind = draw.random()
        if kind < 0.07:
            yield tool_dialogue(draw, asked)
            continue
        if kind < 0.12:
            questions, answer = draw.choice(SMALL_TALK)
            messages = [{"role": "user", "content": draw.choice(questions)}, {"role": "assistant", "content": answer}]
            if draw.random() < 0.35:
                messages[1]["reasoning_content"] = "The user makes small talk. I answer politely."
        elif kind < 0.15:
            left, right = draw.randint(0, 20), draw.randint(0, 20)
            sign = draw.choice("+-")
            messages = [
                {
                    "role": "user",
                    "content": draw.choice(("What is {}?", "How much is {}?")).format(f"{left} {sign} {right}"),
                },
                {
                    "role": "assistant",
                    "content": f"{left} {sign} {right} = {left + right if sign == '+' else left - right}",
                },
            ]
            if draw.random() < 0.35:
                messages[1]["reasoning_content"] = "This is a small calculation."
        turns = 1 if kind < 0.8 else 2
        for _ in range(turns if kind >= 0.15 or draw.random() < 0.3 else 0):
            fact, name = picks.pop()
            messages += exchange(fact, name, draw, builtin)
        if draw.random() < 0.3:
            messages.insert(0, {"role": "system", "content": draw.choice(SYSTEMS)})
        yield messages, []
