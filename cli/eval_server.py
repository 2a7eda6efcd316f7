"""`duovolt eval --url` and `--compare`: a running server's text scores and graded answers."""

import argparse
import json
import math
import sys
from pathlib import Path

import msgspec
from tqdm import tqdm

from ..checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from ..perf.graded.asking import ask_all
from ..perf.graded.items import KINDS, Item, kind_of, needles, read_items
from ..perf.graded.journal import Head, Journal
from ..perf.graded.report import comparison, facts, table
from ..perf.graded.result import CoarseDivergence, Outcome, Result, TextScore, now, pair, read_result, write_result
from ..perf.graded.sandbox import confinement
from ..perf.quality import documents
from ..perf.serve_matrix import Server, ask_server
from ..perf.serve_stream import Endpoint
from ..perf.served_divergence import against_directory, against_server
from ..perf.served_text import NoEcho, TextServer, score_text, total
from ..perf.whole_model import whole_model
from ..runtime.proxy.key import read_key
from .numbers import decimal, whole
from .progress import byte_bar

WEB = ("http://", "https://")
PARTS = ("text", "graded")
_COMPUTES = (
    "conversion_id",
    "recipe",
    "backend",
    "ranks",
    "kv",
    "attention",
    "delta",
    "prompts",
)  # what our server tells of it


def add_server(parser: argparse.ArgumentParser) -> None:
    """The options of a server in place of directories."""
    server = parser.add_argument_group("a running server in place of directories")
    server.add_argument("--url", metavar="U", help="any server with OpenAI's completions and chat")
    server.add_argument("--model", metavar="NAME", help="of the server (default: its first)")
    server.add_argument("--api-key-file", type=Path, metavar="F", help="its first line is the key")
    server.add_argument("--against-key-file", type=Path, metavar="F", help="the key of --against, if that is a server")
    server.add_argument("--what", nargs="+", choices=PARTS, metavar="PART", help="text, graded (default: both)")
    server.add_argument("--top", type=whole, default=5, metavar="K", help="likeliest tokens for --against (default: 5)")
    graded = parser.add_argument_group("graded questions to a server")
    graded.add_argument("--items", type=Path, metavar="FILE", help="your questions, JSON lines, in place of ours")
    graded.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=", ".join(KINDS) + " (default: all)",
    )
    graded.add_argument(
        "--contexts", type=whole, nargs="+", default=[2048, 8192], metavar="N",
        help="tokens of texts that hide a needle (default: 2048 8192)",
    )  # fmt: skip
    graded.add_argument(
        "--answer-tokens", type=whole, default=2048, metavar="N", help="default: 2048, thoughts included"
    )
    graded.add_argument("--no-thinking", action="store_true", help="ask the chat template to leave thinking out")
    graded.add_argument(
        "--silence-seconds", type=decimal, default=600.0, metavar="S", help="give up after (default: 600)"
    )
    graded.add_argument(
        "--out", type=Path, metavar="FILE", help="also keep the result there; answers of a run that broke off, too"
    )
    graded.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two such files; 1 if AFTER is worse"
    )


def run_compare(args: argparse.Namespace) -> int:
    """0, or 1 if the later result lost more questions than chance explains."""
    before, after = map(read_result, args.compare)
    if args.json:
        print(json.dumps(facts(before, after), indent=1))
    elif not args.quiet:
        print(comparison(before, after))
    return 1 if pair(before.graded, after.graded).worse else 0


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.top <= 20:
        raise InputError("--top is 1 to 20.")
    if not 1 <= args.answer_tokens <= 1 << 20:
        raise InputError("--answer-tokens is 1 to 1048576.")
    if not all(512 <= context <= 1 << 22 for context in args.contexts):
        raise InputError("--contexts are from 512 to 4194304 tokens.")
    if not (math.isfinite(args.silence_seconds) and args.silence_seconds > 0):
        raise InputError("--silence-seconds is above 0.")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise InputError(f"--out {args.out}: no such folder.")
    if args.out is not None and args.out.exists() and not args.out.is_file():
        raise InputError(f"--out {args.out}: not a regular file. Name another.")


def run_server(args: argparse.Namespace, text: str) -> int:
    """Measure args.url. Raises InputError, CheckFailed, EnvironmentFault."""
    _check(args)
    items: list[Item] = []
    if "graded" in (args.what or PARTS):
        items = [item for item in read_items(args.items) if kind_of(item) in args.kinds]
    settings = {
        "answer_tokens": str(args.answer_tokens), "thinking": str(not args.no_thinking), "temperature": "0",
        "window": str(args.window),
    }  # fmt: skip
    endpoint = Endpoint(args.url, read_key(args.api_key_file), args.silence_seconds)
    try:
        server = ask_server(endpoint, args.model)
        told = {name: server.facts[name] for name in _COMPUTES if name in server.facts}
        keeps = args.out is not None and "graded" in (args.what or PARTS)
        journal = Journal(args.out if keeps else None, Head(server.model, told, settings))
        finished = False
        try:
            result = _measured(args, endpoint, server, settings, items, text, journal)
            if args.out is not None:
                write_result(args.out, result)
            finished = True
        except (CheckFailed, EnvironmentFault) as error:
            raise type(error)(f"{str(error).rstrip('.')}.{journal.hint}") from None
        finally:
            journal.close(finished=finished)
    finally:
        endpoint.close()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    elif not args.quiet:
        print(table(result))
    return 0


def _measured(
    args: argparse.Namespace,
    endpoint: Endpoint,
    server: Server,
    settings: dict[str, str],
    items: list[Item],
    text: str,
    journal: Journal,
) -> Result:
    skipped: list[str] = []
    score, divergence = None, None
    if "text" in (args.what or PARTS):
        try:
            score, divergence = _text(args, endpoint, server.model, server.max_context, text)
        except NoEcho as error:
            if args.what is not None or args.against is not None:  # it was asked for by name
                raise InputError(f"{error}; --what graded measures the rest.") from None
            _say(args, skipped, f"text: {error}")
    graded, sandbox = _graded(args, endpoint, server.model, server.max_context, items, skipped, journal)
    date, version = now()
    told = server.facts | server.machine
    return Result(date, version, server.model, told, settings, score, divergence, graded, sandbox, skipped)


def _say(args: argparse.Namespace, skipped: list[str], reason: str) -> None:
    skipped.append(reason)
    if not args.quiet:
        print(f"left out: {reason}", file=sys.stderr)


def _text(
    args: argparse.Namespace, endpoint: Endpoint, model: str, limit: int | None, text: str
) -> tuple[TextScore, CoarseDivergence | None]:
    served = TextServer(endpoint, model, args.top if args.against is not None else 1)
    tokens = args.window if limit is None else max(1, min(args.window, limit - 1))
    with byte_bar("eval text", min(args.score_bytes, len(text.encode())), args.quiet) as tick:
        windows = score_text(served, documents(text), tokens, args.score_bytes, tick)
    if args.against is None:
        return total(windows), None
    if not args.against.startswith(WEB):
        return total(windows), against_directory(windows, whole_model(Path(args.against)))
    other = Endpoint(args.against, read_key(args.against_key_file), args.silence_seconds)
    try:
        reference = TextServer(other, ask_server(other, None).model, args.top)
        return total(windows), against_server(windows, reference)
    finally:
        other.close()


def _graded(
    args: argparse.Namespace,
    endpoint: Endpoint,
    model: str,
    limit: int | None,
    items: list[Item],
    skipped: list[str],
    journal: Journal,
) -> tuple[list[Outcome], str]:
    """(outcomes, how code was confined)."""
    asked: list[tuple[str, Item]] = [(kind_of(item), item) for item in items]
    if "graded" in (args.what or PARTS) and "needle" in args.kinds:
        fits = [context for context in args.contexts if limit is None or context + args.answer_tokens <= limit]
        asked += [("needle", item) for _, item in needles(fits)]
        for context in args.contexts:
            if context not in fits:
                _say(args, skipped, f"needles in {context:,} tokens: the server's context is {limit:,} with the answer")
    sandbox = confinement().describe() if any(kind == "code" for kind, _ in asked) else ""
    if "graded" in (args.what or PARTS) and not asked:
        raise InputError("no question of these --kinds; see --items and --contexts.")
    silent = args.quiet or not sys.stderr.isatty()
    with tqdm(total=len(asked), desc="eval questions", unit="question", leave=False, disable=silent) as bar:
        found, refused = ask_all(
            *(endpoint, model, asked, args.answer_tokens, not args.no_thinking),
            lambda outcome: bar.update() and None,
            journal,
        )
    for reason in refused:
        _say(args, skipped, reason)
    return found, sandbox
