"""`duovolt serve`: proxy and ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n"
        "  duovolt serve ranks/ --lanes 2 --max-context 32768\n"
        "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello"}]}\'\n'
        '\n--backend scripted:FILE answers from JSON lines {"blocks": [[ids...], ...], "delay_ms": 0} (for tests).'
    )
    add = parser.add_argument
    add("ranks", type=Path, metavar="RANKS", help="folder that holds rank-0-of-N ..., or one rank-0-of-1")
    add("--backend", default="auto", help="auto, reference or scripted:FILE (default: auto)")
    add(
        "--max-context",
        type=_integer(2),
        help="tokens of prompt and answer together (default: the model's, up to 32768)",
    )
    add("--lanes", type=_integer(1, 4), default=1, help="answers made at once, 1 to 4 (default: 1)")
    add("--drafts", type=_integer(0, 5), default=3, help="tokens drafted a round, 0 to 5 (default: 3)")
    add("--drafts-from", type=Path, metavar="FILE", help="JSON list of lists: the drafts of each round (for tests)")
    add("--prefill-chunk", type=_integer(1), default=512, help="prompt tokens a step (default: 512)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=_integer(0, 65535), default=8000, help="port to listen on, 0 for any free one (default: 8000)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key that clients must send as a bearer token")
    add("--max-waiting", type=_integer(0), default=64, help="requests that may wait for a lane (default: 64)")
    add(
        "--max-wait-seconds",
        type=_seconds(False),
        default=600.0,
        help="a request that waits longer for a lane gets 503 (default: 600)",
    )
    add("--drain-seconds", type=_seconds(True), default=10.0, help="time for running answers at SIGTERM (default: 10)")
    add(
        "--watchdog-seconds",
        type=_seconds(False),
        default=180.0,
        help="a step longer than this is a hang (default: 180)",
    )


def run(args: argparse.Namespace) -> int:
    from ..runtime.proxy.options import ServeOptions
    from ..runtime.proxy.server import serve

    return serve(ServeOptions(**{name: getattr(args, name) for name in ServeOptions.__dataclass_fields__}))


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {bounds}")
        return value

    return parse


def _seconds(zero: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
        return value

    return parse
