"""`duovolt bench serve --overhead`: what our server costs a token, over scripted answers."""

import argparse
import dataclasses
import json
import statistics

from ..checkpoint.errors import InputError
from .numbers import whole


def add_overhead(parser: argparse.ArgumentParser) -> None:
    """The options that belong to it."""
    own = parser.add_argument_group("what our server costs")
    own.add_argument("--overhead", action="store_true", help="what the server costs a token")
    own.add_argument("--rate", type=whole, default=500, metavar="N", help="tokens a second and lane (default: 500)")
    own.add_argument("--rounds", type=whole, default=5, metavar="N", help="answers of each client (default: 5)")
    own.add_argument("--ranks", type=whole, choices=(1, 2), default=2, help="rank processes (default: 2)")
    own.add_argument("--requests", type=whole, default=1000, metavar="N", help="to watch memory over (default: 1000)")


def run_overhead(args: argparse.Namespace) -> int:
    """Measure and print."""
    from ..perf.overhead import measure_memory, measure_stream

    args.tokens = 1500 if args.tokens is None else args.tokens
    if not 1 <= args.rate <= 100_000 or not 10 <= args.tokens <= 20_000 or args.rounds < 1 or args.requests < 0:
        raise InputError("--rate is 1 to 100000, --tokens 10 to 20000, --rounds at least 1, --requests 0 or more.")
    streams = []
    for clients in (1, 4):
        stream = measure_stream(args.rate, args.tokens, clients, args.rounds, args.ranks)
        streams.append(stream)
        if not (args.json or args.quiet):
            wanted = {1: 0.97, 4: 0.90}[clients]
            print(
                f"{clients} at once: median {statistics.median(stream.rates):.1f} tok/s a client, {stream.share:.1%} of "
                f"{args.rate} (wanted {wanted:.0%}; {statistics.median(stream.relayed):.1f} reached the proxy); first byte "
                f"{stream.first_byte_ms:.2f} ms after the first token (median; worst {stream.worst_first_byte_ms:.2f})\n"
                f"  CPU a token: engine {stream.engine_us:.0f} us a rank, detokenising {stream.detokenise_us:.1f} us, "
                f"HTTP {stream.http_us:.0f} us",
                flush=True,
            )
    memory = measure_memory(args.requests, args.ranks) if args.requests else None
    if memory is not None and not (args.json or args.quiet):
        print(
            f"{memory.requests} requests: {memory.first_mb:.1f} MB after the first fifth, {memory.last_mb:.1f} MB at the "
            f"end, slope {memory.slope_bytes:.0f} bytes a request; {memory.per_second:.0f} requests a second"
        )
    if args.json:
        found = {"streams": [dataclasses.asdict(stream) for stream in streams]}
        print(json.dumps(found | {"memory": memory and dataclasses.asdict(memory)}, indent=1))
    return 0
