"""argparse, with errors in one line and a memory of what was stated, a value that equals its default included."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .reads import Reads


class Parser(argparse.ArgumentParser):
    """Of a command, or of a task of one. `reads`: what its runs read of its options."""

    reads: Reads | None = None

    def error(self, message: str) -> NoReturn:
        """One line, as all other errors are: of many options, usage hides what is wrong."""
        self.exit(2, f"{self.prog}: {message}. `{self.prog} --help` shows what there is.\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse drops what a full disk refuses, and its help is then told as done."""
        with contextlib.suppress(BrokenPipeError):  # `| head` has what it wanted
            (file or sys.stderr).write(message)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments. Raises InputError for an option that they give no use for, SystemExit as argparse does."""
        defaults = {}
        for action in _optionals(self):
            defaults[action] = action.default
            action.default = argparse.SUPPRESS
        try:
            args = self.parse_args(words)
        finally:
            for action, default in defaults.items():
                action.default = default
        known = {action.dest for action in defaults}
        stated = [name for name in vars(args) if name in known]
        ran = list(_chosen(self, args))
        for parser in ran:
            for action in parser._actions:
                if action.option_strings and action.default is not argparse.SUPPRESS and not hasattr(args, action.dest):
                    setattr(args, action.dest, action.default)
        for parser in ran:
            if parser.reads is not None and not parser.reads.layered:
                own = {one.dest: defaults[one] for one in parser._actions if one in defaults}
                parser.reads.refuse_unread(args, stated, own)
        return args


def tasks_of(parser: argparse.ArgumentParser) -> tuple[str, dict[str, "Parser"]]:
    """(name of the argument that chooses a task, task -> its parser); nothing for a parser without tasks."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices: Any = action.choices
            return action.dest, dict(choices)
    return "", {}


def _optionals(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options of a parser and its tasks that have a default to be told apart from what is stated."""
    yield from (action for action in parser._actions if action.option_strings and action.dest != "help")
    for task in tasks_of(parser)[1].values():
        yield from _optionals(task)


def _chosen(parser: Parser, args: argparse.Namespace) -> Iterator[Parser]:
    yield parser
    name, tasks = tasks_of(parser)
    if tasks:
        yield from _chosen(tasks[getattr(args, name)], args)
