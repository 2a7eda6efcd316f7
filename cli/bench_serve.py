"""`duovolt bench serve`: a running server over context, material and lanes; or what our server itself costs."""

import argparse
import json
import math
import sys
from pathlib import Path

from ..checkpoint.directory import require_report_place
from ..checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from ..perf.materials import MATERIALS
from ..perf.serve_record import Record, Settings, read_record
from ..runtime.proxy.key import read_key
from .bench_serve_overhead import add_overhead, run_overhead
from .numbers import decimal, whole
from .reads import ALWAYS, Reads, given, without

EXAMPLE = """examples:
  duovolt bench serve --url http://127.0.0.1:8000 --out run.jsonl
  duovolt bench serve --url http://127.0.0.1:8000 --contexts 8192 --lanes 1 2 --seeds 2 --tokens 256
  duovolt bench serve --report run.jsonl --against before.jsonl --plot .
  duovolt bench serve --overhead

A running server, ours or any other with OpenAI's chat API, reads texts made from templates and goes on with them: tokens a
second after the first, time to the first token with a new prompt and with one it has in its cache, and, where the server
tells them, acceptance of drafts and milliseconds a round. Run again with the same --out, it goes on where it stopped.
--overhead starts a server of its own with scripted answers, so that what is measured is everything but the model: one
token a round, streamed over /v1/chat/completions to clients that only read; times a token are of CPU."""


_MEASURING = without("overhead", "report")
READS = Reads(
    {
        ALWAYS: "overhead json",
        without("overhead"): "report against plot",
        _MEASURING: "url model api_key_file contexts materials lanes seeds cold_seeds temperature stop_at_end silence_seconds "
        "machine out",
        without("report"): "tokens",
        given("overhead"): "rate rounds ranks requests",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    what = parser.add_argument_group("what to measure")
    what.add_argument("--url", metavar="U", help="a running server")
    what.add_argument("--model", metavar="NAME", help="of the server (default: its first)")
    what.add_argument("--api-key-file", type=Path, metavar="F", help="its first line is the key")
    what.add_argument(
        "--contexts", type=whole, nargs="+", default=[8192, 32768, 131072, 262144], metavar="N",
        help="tokens of prompt and answer together (default: 8192 32768 131072 262144)",
    )  # fmt: skip
    what.add_argument("--materials", nargs="+", choices=MATERIALS, default=list(MATERIALS), help="default: all")
    what.add_argument("--lanes", type=whole, nargs="+", default=[1], metavar="L", help="answers at once (default: 1)")
    what.add_argument("--seeds", type=whole, default=4, metavar="N", help="answers of each kind (default: 4)")
    what.add_argument("--cold-seeds", type=whole, default=1, metavar="N", help="of them with a new prompt (default: 1)")
    parser.add_argument("--tokens", type=whole, metavar="N", help="of an answer (default: 1024; --overhead: 1500)")
    what.add_argument("--temperature", type=decimal, default=0.6, metavar="T", help="default: 0.6")
    what.add_argument("--stop-at-end", action="store_true", help="send no `ignore_eos`: for servers that refuse it")
    what.add_argument(
        "--silence-seconds", type=decimal, default=3600, metavar="S", help="give up after (default: 3600)"
    )
    what.add_argument("--machine", nargs="+", default=[], metavar="K=V", help="what the server does not tell: card=...")
    result = parser.add_argument_group("what to do with it")
    result.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, an answer each; gone on with if there")
    result.add_argument("--report", type=Path, metavar="FILE", help="only the table of a file of --out")
    result.add_argument("--against", type=Path, metavar="FILE", help="compare with another such file")
    result.add_argument("--plot", type=Path, metavar="DIR", help="also draw two SVGs there, with matplotlib")
    result.add_argument("--json", action="store_true", help="machine-readable")
    add_overhead(parser)


def _machine(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    if bad := [key for key, equals, _ in pairs if not equals or not key]:
        raise InputError(f"--machine {bad[0]!r}: expected NAME=VALUE, for example card=V100 driver=580.")
    return {key: value for key, _, value in pairs}


def _check(args: argparse.Namespace) -> None:
    if args.url is None:
        raise InputError("bench serve needs --url of a running server, --report FILE, or --overhead.")
    if not all(64 <= context <= 1 << 24 for context in args.contexts):
        raise InputError("--contexts are from 64 to 16777216 tokens.")
    if not all(1 <= lanes <= 256 for lanes in args.lanes):
        raise InputError("--lanes are from 1 to 256.")
    if not 1 <= args.seeds <= 1000 or not 0 <= args.cold_seeds <= args.seeds:
        raise InputError("--seeds is 1 to 1000, --cold-seeds 0 up to --seeds.")
    if not 2 <= args.tokens <= 1 << 20:
        raise InputError("--tokens is 2 to 1048576.")
    if not (0 <= args.temperature <= 2) or not (math.isfinite(args.silence_seconds) and args.silence_seconds > 0):
        raise InputError("--temperature is 0 to 2, --silence-seconds above 0.")
    require_report_place(args.out, (), "--out")


def _measure(args: argparse.Namespace, machine: dict[str, str]) -> Record:
    from tqdm import tqdm

    from ..perf.serve_matrix import Matrix, ask_server, count_materials, open_run
    from ..perf.serve_stream import Endpoint

    settings = Settings(
        args.contexts, args.materials, args.lanes, args.seeds, args.cold_seeds, args.tokens, args.temperature,
        not args.stop_at_end,
    )  # fmt: skip
    endpoint = Endpoint(args.url, read_key(args.api_key_file), args.silence_seconds)
    try:
        server = ask_server(endpoint, args.model)
        record, journal = open_run(
            args.out, server, settings, machine, lambda: count_materials(endpoint, settings.materials)
        )
        matrix = Matrix(endpoint, server, record, journal)
        if not args.quiet:
            for reason in matrix.skipped():
                print(f"left out: {reason}", file=sys.stderr)
        left = matrix.left()
        silent = args.quiet or not sys.stderr.isatty()
        try:
            with tqdm(total=len(left), desc="bench serve", unit="step", leave=False, disable=silent) as bar:
                for step in left:
                    bar.set_description_str(step.describe())
                    found = matrix.run(step, bar.set_postfix_str)
                    bar.update()
                    if not args.quiet and not args.json:
                        first, rate = found[0].first_ms / 1e3, found[0].rate or 0.0
                        bar.write(f"{step.describe()}: first token {first:.2f} s, {rate:.1f} tok/s", file=sys.stderr)
        except (CheckFailed, EnvironmentFault) as error:
            kept = "" if args.out is None else f" What came before is in {args.out}: the same command goes on there."
            raise type(error)(f"{str(error).rstrip('.')}.{kept}") from None
        finally:
            journal.close()
        return Record(matrix.head, matrix.answers)
    finally:
        endpoint.close()


def run(args: argparse.Namespace) -> int:
    if args.overhead:
        return run_overhead(args)
    from ..perf.serve_report import comparison, facts, plot, table

    if args.plot is not None and not args.plot.is_dir():
        raise InputError(f"--plot {args.plot}: not a directory.")
    other = None if args.against is None else read_record(args.against)
    if args.report is not None:
        record = read_record(args.report)
    else:
        args.tokens = 1024 if args.tokens is None else args.tokens
        _check(args)
        machine = _machine(args.machine)
        record = _measure(args, machine)
    if not record.answers:
        raise InputError("nothing was measured: no step fits the server, or the file holds no answer.")
    if args.json:
        print(json.dumps(facts(record), indent=1))
    elif not args.quiet:
        print(table(record) if other is None else comparison(record, other))
    if args.plot is not None:
        for path in plot(record, args.plot):
            if args.quiet:
                continue
            print(f"drawn: {path}", file=sys.stderr)
    return 0
