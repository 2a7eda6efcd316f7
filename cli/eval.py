"""`duovolt eval`: directories here; a running server and two results in eval_server."""

import argparse
import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..checkpoint.errors import InputError
from ..perf.divergence import Predictor
from ..perf.quality import Protocol, Quality, measure
from ..perf.whole_model import whole_model
from .eval_arithmetic import add_arithmetic, run_arithmetic
from .eval_server import PARTS, WEB, add_server, run_compare, run_server
from .numbers import whole
from .progress import byte_bar
from .reads import ALWAYS, Condition, Reads, given, without

EXAMPLE = """example:
  duovolt eval converted
  duovolt eval converted --text my.txt --words my-words.txt --prompts 50 --json

Several directories are measured in one run, so that a recipe can be compared with its source; --against also gives the
divergence of each from a reference's predictions, token by token on the same text:
  duovolt eval source converted
  duovolt eval converted --against source

A running server, ours or another: held-out text through completions with echo and logprobs, and graded questions (choices,
code run in a sandbox, needles in long texts) through its chat, greedily. docs/eval.md says how each is graded:
  duovolt eval --url http://127.0.0.1:8000 --out now.json
  duovolt eval --url http://127.0.0.1:8000 --what text --against http://127.0.0.1:8001
  duovolt eval --compare before.json now.json

What the engine's arithmetic costs on this machine's card, at depths of a long text (docs/eval.md):
  duovolt eval ranks1 --arithmetic --text long.txt --paths fp16 int8"""


_DIRECTORIES = Condition("for the quality of directories", lambda args: args.directories and not args.arithmetic)
_SERVER = given("url") & without("arithmetic")
_TEXT = Condition("for a server's text", lambda args: args.url and "text" in (args.what or PARTS))
_GRADED = Condition("for a server's graded answers", lambda args: args.url and "graded" in (args.what or PARTS))
_NEEDLES = Condition("for needles (--kinds)", lambda args: _GRADED.holds(args) and "needle" in args.kinds)
_COMPARED = Condition("with --against URL", lambda args: (args.against or "").startswith(WEB))
_ARITHMETIC = given("arithmetic")
READS = Reads(
    {
        ALWAYS: "directories url compare arithmetic json",
        _DIRECTORIES: "against text words window score_bytes prompts prompt_tokens continuation drafts",
        _SERVER: "model api_key_file what silence_seconds out",
        _TEXT: "against text window score_bytes",
        _TEXT & given("against"): "top",
        _TEXT & _COMPARED: "against_key_file",
        _GRADED: "items kinds answer_tokens no_thinking",
        _NEEDLES: "contexts",
        _ARITHMETIC: "paths ranks context positions chunk device arch random",
        _ARITHMETIC & given("random"): "layers seed",
        _ARITHMETIC & without("random"): "text",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "directories", type=Path, nargs="*", metavar="DIR", help="source, converted, or a folder of one rank"
    )
    parser.add_argument(
        "--against",
        metavar="DIR",
        help="also the KL divergence from this directory's predictions (with --url: or server's)",
    )
    parser.add_argument("--text", type=Path, help="held-out text (default: the bundled one, Python documentation)")
    parser.add_argument("--words", type=Path, help="known words, one a line (default: the bundled list)")
    for field in dataclasses.fields(Protocol):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=whole, default=field.default, metavar="N", help=f"default: {field.default}")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    add_server(parser)
    add_arithmetic(parser)


def _text(path: Path | None, bundled: str) -> str:
    try:
        return (path or resources.files("duovolt.tiny") / bundled).read_text(encoding="utf-8")  # type: ignore[union-attr]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path or bundled}: {getattr(error, 'strerror', None) or error}.") from None


def line(directory: Path, quality: Quality) -> str:
    """One row of the table."""
    found, divergence = quality.divergence, ""
    if found is not None:
        divergence = f"KL {found.mean:.5f} nats a token, same likeliest token {found.agreement:.1%}  "
    return (
        f"{directory.name:<16} {quality.bits_per_byte:6.3f} bits a byte ({quality.scored_bytes:,} bytes)  "
        f"perplexity {quality.perplexity:.3f}  {divergence}"
        f"known words {quality.known_word_share:6.1%} of {quality.words:,}  "
        f"acceptance {quality.acceptance:6.1%} ({quality.accepted}/{quality.proposed}, {quality.drafts} drafts)  "
        f"{quality.tokens_per_second:.0f} tok/s on this CPU"
    )


def comparison(name: str, quality: Quality, first_name: str, first: Quality) -> str:
    """What the later directory lost or gained against the first."""
    bits = quality.bits_per_byte - first.bits_per_byte
    return (
        f"{name} against {first_name}: {bits:+.4f} bits a byte ({bits / first.bits_per_byte:+.2%}), "
        f"acceptance {100 * (quality.acceptance - first.acceptance):+.1f} points"
    )


def run(args: argparse.Namespace) -> int:
    if args.arithmetic:
        if args.url is not None or args.compare is not None:
            raise InputError("--arithmetic goes with neither --url nor --compare.")
        return run_arithmetic(args)
    if sum((bool(args.directories), args.url is not None, args.compare is not None)) != 1:
        raise InputError("eval needs one of: directories, --url of a running server, --compare of two results.")
    if args.compare is not None:
        return run_compare(args)
    text = _text(args.text, "heldout.txt")
    words = set(_text(args.words, "words.txt").split())
    protocol = Protocol(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Protocol)})
    if bad := [name for name, value in dataclasses.asdict(protocol).items() if value < (0 if name == "drafts" else 1)]:
        raise InputError(f"--{bad[0].replace('_', '-')}: at least 1.")
    if args.url is not None:
        return run_server(args, text)
    if args.against is not None and args.against.startswith(WEB):
        raise InputError("--against a server needs --url: a directory is measured against a directory.")
    found: dict[str, dict[str, Any]] = {}
    against = None if args.against is None else Predictor(whole_model(Path(args.against)), protocol.window)
    first: tuple[str, Quality] | None = None
    for directory in args.directories:
        total = protocol.score_bytes + protocol.prompts * protocol.continuation
        with byte_bar(f"eval {directory.name}", total, args.quiet) as tick:
            quality = measure(whole_model(directory), text, words, protocol, tick, against)
        derived = {"acceptance": quality.acceptance, "perplexity": quality.perplexity}
        found[str(directory)] = dataclasses.asdict(quality) | derived
        if not (args.json or args.quiet):
            print(line(directory, quality), flush=True)
            if first is not None:
                print(comparison(directory.name, quality, *first), flush=True)
        first = first or (directory.name, quality)
    if args.json:
        print(json.dumps(found, indent=1))
    return 0
