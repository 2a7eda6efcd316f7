"""What a command reads of its arguments, its parser puts there; and what the parser takes, the command reads."""

import argparse
import ast
import importlib
from pathlib import Path

import pytest

from duovolt.cli import bench
from duovolt.cli.main import COMMANDS

CLI = Path(bench.__file__).parent
MODULES = sorted({name for name, _ in (*COMMANDS.values(), *bench.TASKS.values())} - {"bench"})
OF_MAIN = {"quiet", "debug"}
BY_NAME = {"rank", "serve", "eval"}  # these read their options by a list of names


def parsed(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"duovolt.cli.{name}").configure(parser)
    return parser


def read_of(tree: ast.AST) -> set[str]:
    """X of every `args.X` and `self._args.X`, whether it is read or written."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "self._args")
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_argument_that_is_read_has_an_option(name: str) -> None:
    known = {action.dest for action in parsed(name)._actions} | OF_MAIN
    tree = ast.parse((CLI / f"{name}.py").read_text(encoding="utf-8"))
    assert read_of(tree) <= known


@pytest.mark.parametrize("name", sorted(set(MODULES) - BY_NAME))
def test_every_option_is_read_somewhere(name: str) -> None:
    known = {action.dest for action in parsed(name)._actions} - OF_MAIN - {"help"}
    everywhere = set().union(*(read_of(ast.parse(path.read_text(encoding="utf-8"))) for path in CLI.glob("*.py")))
    assert known <= everywhere
