"""Every command that a document tells its reader to type is one that the program takes, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

from duovolt.cli.main import COMMANDS, _parser, main
from duovolt.cli.serve import options_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(duovolt [^`]+)`")
# What a text only mentions may lack what it works on, or have a letter for it: `duovolt ledger`, `--release R`.
MENTION = re.compile(r"arguments are required|expected (at least )?one argument|invalid choice: '[A-Z]'")


def commands(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    indented = re.findall(r"^ {4}(duovolt .+)$", FENCE.sub("", text).replace("\\\n", " "), re.M)
    told = (
        [line for line in lines if re.match(r"duovolt [a-z]+( |$)", line)]
        + indented
        + INLINE.findall(FENCE.sub("", text))
    )
    return sorted({re.split(r" +#| > ", line)[0].strip() for line in told} - {"duovolt COMMAND --help"})


@pytest.mark.parametrize(("name", "line"), [(name, line) for name in DOCUMENTS for line in commands(name)])
def test_a_documented_command_parses(name, line, capsys):
    command, *arguments = line.split()[1:]
    assert command in COMMANDS
    parser, _ = _parser(command)
    try:
        args = parser.parse(arguments)
        if command == "serve" and args.ranks is not None:
            options_of(args)  # other places than the command line say nothing here
    except SystemExit as stopped:
        said = capsys.readouterr().err
        if stopped.code and not MENTION.search(said):  # --help ends with 0
            pytest.fail(f"{name}: {line}\n{said}")


def anchors(document: Path) -> set[str]:
    """Names of a document's headings, as the forge makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    here = ROOT / name
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", here.read_text(encoding="utf-8")):
        there = here.parent / target if target else here
        assert there.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(there), f"{name}: {target}#{anchor}"


FIGURES = ("docs/benchmarks.md", "docs/benchmarks/quality.md", "docs/benchmarks/stages.md")
SECTIONS = [
    (name, part.partition("\n")[0], part)
    for name in FIGURES
    for part in re.split(r"^## ", (ROOT / name).read_text(encoding="utf-8"), flags=re.M)[1:]
]


@pytest.mark.parametrize(("name", "title", "text"), SECTIONS, ids=[title for _, title, _ in SECTIONS])
def test_figures_have_their_command_date_and_versions(name, title, text):
    assert re.search(r"`(duovolt|python -m duovolt|pytest) ", text), "no command"
    assert re.search(r"20\d\d-\d\d-\d\d|\d+ (November|December) 20\d\d", text), "no date"
    if "H200" in text:
        assert re.search(r"driver \d{3}\.\d+", text) and re.search(r"torch \d\.\d+\.\d", text), "no driver or torch"


REPRODUCED = [  # rows of docs/reproduce.md that are the same on every machine: a command, and what it is to print
    (command, words)
    for _, command, words, stop in re.findall(
        r"^\| ([^|]+) \| `(duovolt [^`]+)` \| `([^`]+)` \| ([^|]+) \|$",
        (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8"),
        re.M,
    )
    if stop.startswith("any digit differs")
]


@pytest.mark.parametrize(("command", "words"), REPRODUCED)
def test_what_is_to_be_reproduced_is_printed(command, words, capsys):
    assert main(command.split()[1:]) == 0
    assert words in re.sub(r" +", " ", capsys.readouterr().out)


def test_the_rows_that_arithmetic_decides_are_tested():
    assert {command.split()[1] for command, _ in REPRODUCED} == {"bench", "ledger", "predict"} and len(REPRODUCED) == 4
