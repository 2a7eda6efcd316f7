"""Every command that a guide tells its reader to type is one that the program takes."""

import re
from pathlib import Path

import pytest

from duovolt.cli.main import COMMANDS, _parser

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ("v100.md", "reproduce.md")
FENCE = re.compile(r"^```\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(duovolt [^`]+)`")


def commands(guide: str) -> list[str]:
    text = (DOCS / guide).read_text(encoding="utf-8")
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()]
    told = [line for line in lines if line.startswith("duovolt ")] + INLINE.findall(FENCE.sub("", text))
    return sorted({re.split(r" {2,}#| > ", line)[0].strip() for line in told})


@pytest.mark.parametrize(("guide", "line"), [(guide, line) for guide in GUIDES for line in commands(guide)])
def test_a_documented_command_parses(guide, line, capsys):
    command, *arguments = line.split()[1:]
    assert command in COMMANDS
    parser, _ = _parser(command)
    try:
        parser.parse_args(arguments)
    except SystemExit as stopped:
        if stopped.code:  # --help ends with 0
            pytest.fail(f"docs/{guide}: {line}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("guide", GUIDES)
def test_links_of_a_guide_lead_somewhere(guide):
    targets = re.findall(r"\]\(([^)#]+)\)", (DOCS / guide).read_text(encoding="utf-8"))
    assert targets and all((DOCS / target).exists() for target in targets)
