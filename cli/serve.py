"""`duovolt serve`: proxy and ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.errors import InputError, no_effect, without_effect
from ..checkpoint.numbers import shown
from .layers import Option, add_options, settle, truth
from .numbers import cards, memory, memory_or_auto, positions, seconds, whole_from
from .reads import ALWAYS, Condition, Reads, given, spelled, valued

if TYPE_CHECKING:
    from ..runtime.proxy.options import ServeOptions

EXAMPLE = """examples:
  duovolt serve ranks/ --lanes 2 --max-context 32768
  duovolt serve --config serve.toml
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

--backend scripted:FILE answers from JSON lines {"blocks": [[ids...], ...], "delay_ms": 0} (for tests)."""

_LONGEST_NAME = 200
_FOR_CARDS = Condition("by the cuda backend", lambda args: args.backend in ("auto", "cuda"))
_ON_CARDS = Condition("on cards", lambda args: args.devices != "cpu")
_DRAFTING = Condition("with --drafts", lambda args: args.drafts != 0)
_MODEL = Condition("by a model, not a script", lambda args: not args.backend.startswith("scripted"))
READS = Reads(
    {
        ALWAYS: "config ranks backend lanes max_context host port api_key_file tls_cert tls_key cors_origin log_requests "
        "served_model_name allow_image_urls max_waiting drain_seconds watchdog_seconds",
        _MODEL: "drafts drafts_from prefill_chunk prefix_cache",
        _FOR_CARDS: "devices kv attention head_split delta",
        _FOR_CARDS & _ON_CARDS: "graphs collective plain_weights",
        _FOR_CARDS & valued("graphs", "off"): "graphs",  # as it is without cards
        _FOR_CARDS & _DRAFTING: "draft_window",
        _MODEL & _DRAFTING: "draft_head",
        _MODEL & given("prefix_cache"): "prefix_interval",
        given("log_requests"): "log_content",
        given("max_waiting"): "max_wait_seconds",
    },
    layered=True,
)


def server_options() -> list[Option]:
    return [
        Option(
            "backend",
            str,
            "auto (cards that fit, else the reference), cuda, reference or scripted:FILE",
            place_after="scripted:",
        ),
        Option(
            "devices",
            cards(),
            "cards of the ranks, by number as the driver's tool lists them (default: the first ones); one card twice (0,0): "
            "both ranks on it, slow, to try two ranks; cpu: the kernels' torch references, slow, for tests",
            metavar="N[,N]",
        ),
        Option(
            "max-context",
            positions(2),
            "tokens of prompt and answer together, or auto: the longest that fits the cards (default: auto on cards, else "
            "the model's, up to 32768)",
            metavar="N",
        ),
        Option("kv", _one_of("int8", "fp16"), "keys and values on cards: int8 or fp16 (default: int8)"),
        Option(
            "attention",
            _one_of("split", "plain"),
            "attention on cards: positions split over blocks, on tensor cores; or plain: in order, in float32, slow "
            "(default: split)",
        ),
        Option(
            "head-split",
            _one_of("on", "off"),
            "with two cards, gather only the logits that can decide a token where they are enough (on), or always all of "
            "them (default: off)",
        ),
        Option(
            "graphs",
            _one_of("on", "serial", "off"),
            "rounds and chunks of prompts as captured graphs, on cards; serial: no launch begins before the last has ended "
            "(default: on)",
        ),
        Option(
            "delta",
            _one_of("chunked", "recurrent"),
            "a prompt's way through the gated delta rule, on cards: 64 tokens at a time on tensor cores, or one by one, "
            "which gives the bits of decoding (default: chunked)",
        ),
        Option(
            "collective",
            _one_of("auto", "host", "ipc", "nccl"),
            "sums between two cards: tried and timed at start (auto), or through host memory, peer memory, NCCL",
        ),
        Option(
            "draft-window",
            whole_from(0),
            "tokens of context that drafting looks at, on cards; 0: all (default: 0)",
        ),
        Option(
            "plain-weights",
            memory_or_auto,
            "of a card's memory, for weights that stay as prompts' products take them, so that prompts are read sooner: "
            "what is left (auto), a size at most, such as 4G, or off (default: auto)",
            metavar="SIZE",
        ),
        Option("lanes", whole_from(1, 4), "answers made at once, 1 to 4 (default: 1)"),
        Option("drafts", whole_from(0, 5), "tokens drafted a round, 0 to 5 (default: 3, or 0 without an MTP layer)"),
        Option(
            "draft-head",
            _one_of("auto", "on", "off"),
            "draw drafts with the reduced head: auto (if there is one), on, off",
        ),
        Option(
            "drafts-from", Path, "JSON list of lists: the drafts of each round (for tests)", metavar="FILE", place=True
        ),
        Option("prefill-chunk", whole_from(1), "prompt tokens a step (default: 2048 for one lane on cards, else 512)"),
        Option(
            "prefix-cache",
            memory,
            "host memory a rank may fill with the states of prompts it has read, such as 512M or 4G, or off (default: 2G)",
            metavar="SIZE",
        ),
        Option(
            "prefix-interval", whole_from(64, 1 << 24), "tokens between the states of a long prompt (default: 8192)"
        ),
        Option(
            "served-model-name",
            _model_name,
            "what clients are told that the model is called (default: the repository it came from, else the folder's name)",
            metavar="NAME",
        ),
        Option("host", str, "address to listen on (default: 127.0.0.1)"),
        Option("port", whole_from(0, 65535), "port to listen on, 0 for any free one (default: 8000)"),
        Option(
            "api-key-file",
            Path,
            "file with keys, one a line; clients must send one of them as a bearer token",
            metavar="FILE",
            place=True,
        ),
        Option("tls-cert", Path, "PEM certificate, with its chain: serve https", metavar="FILE", place=True),
        Option("tls-key", Path, "PEM key of the certificate, without a password", metavar="FILE", place=True),
        Option(
            "cors-origin",
            str,
            "origin of web pages that may use the API, such as https://chat.example.org; * for all; repeatable",
            metavar="ORIGIN",
            many=True,
        ),
        Option(
            "log-requests",
            Path,
            "append a line of JSON a request to FILE, or - for standard output",
            metavar="FILE",
            place=True,
        ),
        Option("log-content", truth, "also log what was asked and answered (default: no)"),
        Option(
            "allow-image-urls", truth, "also read pictures by http and https URL, from public addresses (default: no)"
        ),
        Option("max-waiting", whole_from(0), "requests that may wait for a lane (default: 64)"),
        Option(
            "max-wait-seconds", seconds(zero=False), "a request that waits longer for a lane gets 503 (default: 600)"
        ),
        Option("drain-seconds", seconds(zero=True), "time for running answers at SIGTERM (default: 10)"),
        Option("watchdog-seconds", seconds(zero=False), "a step longer than this is a hang (default: 180)"),
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "ranks",
        type=Path,
        nargs="?",
        metavar="RANKS",
        help="folder that holds rank-0-of-N ..., or one rank-0-of-1",
    )
    add_options(parser, server_options())


def run(args: argparse.Namespace) -> int:
    from ..runtime.proxy.server import serve

    return serve(options_of(args))


def options_of(args: argparse.Namespace) -> ServeOptions:
    """What all layers together say, less what would have no effect and stands elsewhere than on the command line: a line each.

    Raises InputError as `settle`, and for an option of the command line that would have none.
    """
    from ..runtime.proxy.options import ServeOptions

    stated = settle(args, [*server_options(), Option("ranks", Path, "", metavar="a folder", place=True)])
    if "ranks" not in stated:
        raise InputError("RANKS is missing: name the folder of ranks, or set ranks in --config FILE or DUOVOLT_RANKS.")
    places = {name: one.place for name, one in stated.items() if one.place}
    options = ServeOptions(**{name: one.value for name, one in stated.items()}, quiet=args.quiet, places=places)
    defaults = {one.name: one.default for one in fields(ServeOptions) if one.default is not MISSING}
    for name, why in READS.unread(argparse.Namespace(**vars(options)), stated, defaults):
        if name not in places:
            raise without_effect(spelled(name), why)
        options = replace(options, **{name: defaults[name]})
        if not args.quiet:
            print(f"duovolt serve: {no_effect(places[name], why)}.", file=sys.stderr, flush=True)
    return options


def _model_name(text: str) -> str:
    # A last slash would be lost from /v1/models/NAME: it says nothing in a path.
    fits = 0 < len(text) <= _LONGEST_NAME and not text.endswith("/")
    if not (fits and text.isprintable() and not any(map(str.isspace, text))):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no name of a model: 1 to {_LONGEST_NAME} printable characters, no spaces, no slash at the end"
        )
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return parse
