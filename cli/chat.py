"""`duovolt chat`: talk to a running server."""

from __future__ import annotations

import argparse
from pathlib import Path

from .numbers import decimal_from, whole
from .reads import ALWAYS, Reads

READS = Reads({ALWAYS: "url once system api_key_file temperature max_tokens seed no_thinking"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = 'examples:\n  duovolt chat\n  duovolt chat --once "What does the len function do?" --temperature 0'
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    add("--once", metavar="QUESTION", help="ask one question, print the answer and end")
    add("--system", help="system message")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the server's key")
    add("--temperature", type=decimal_from(0), help="0 for the most likely answer (default: the model's)")
    add("--max-tokens", type=whole, help="longest answer in tokens (default: what the context holds)")
    add("--seed", type=whole, help="makes a sampled answer repeatable")
    add("--no-thinking", action="store_true", help="ask the model to answer at once")


def run(args: argparse.Namespace) -> int:
    from ..runtime.proxy.client import ChatClient, converse
    from ..runtime.proxy.key import read_key

    settings = {
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "chat_template_kwargs": {"enable_thinking": False} if args.no_thinking else None,
    }
    client = ChatClient(
        args.url, read_key(args.api_key_file), {name: value for name, value in settings.items() if value is not None}
    )
    return converse(client, args.system, args.once, args.quiet)
