"""`duovolt rank`: one rank process."""

from __future__ import annotations

import argparse
from pathlib import Path

from .numbers import decimal, whole
from .reads import ALWAYS, Reads

READS = Reads(
    {
        ALWAYS: "dir rank size endpoint shared parent backend max_context lanes drafts prefill_chunk sampleable "
        "exchange_seconds ends draft_head device kv attention head_split graphs delta draft_window collective pages "
        "plain_bytes cpus "
        "prefix_bytes prefix_interval drafts_from"  # what a start has no use for is the proxy's to say
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example (serve does this): duovolt rank --dir ranks/rank-0-of-2 --rank 0 --size 2 "
        "--endpoint ipc:///run/user/1000/duovolt-1-1-00000000/rank-0 --shared duovolt-1-1-00000000 ..."
    )
    parser.add_argument("--dir", type=Path, required=True, help="rank directory")
    parser.add_argument("--rank", type=whole, required=True, help="number of this rank")
    parser.add_argument("--size", type=whole, required=True, choices=(1, 2), help="number of ranks")
    parser.add_argument("--endpoint", required=True, help="socket of the proxy")
    parser.add_argument("--shared", required=True, help="name of the shared-memory file")
    parser.add_argument("--parent", type=whole, required=True, help="pid of the proxy; the rank dies with it")
    parser.add_argument("--backend", required=True, help="reference, cuda or scripted:FILE")
    parser.add_argument("--max-context", type=whole, required=True, help="tokens of prompt and answer together")
    parser.add_argument("--lanes", type=whole, required=True, help="answers made at once")
    parser.add_argument("--drafts", type=whole, required=True, help="tokens drafted a round")
    parser.add_argument("--prefill-chunk", type=whole, required=True, help="prompt tokens a step")
    parser.add_argument("--sampleable", type=whole, required=True, help="ids that the tokenizer can emit")
    parser.add_argument("--exchange-seconds", type=decimal, required=True, help="longest wait for the other rank")
    parser.add_argument("--ends", default="", metavar="IDS", help="ids that end an answer, with commas between")
    parser.add_argument("--draft-head", choices=("auto", "on", "off"), default="auto", help="as for serve")
    parser.add_argument("--device", default="cpu", help="cuda:N, or cpu for the kernels' torch references")
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="as for serve")
    parser.add_argument("--attention", choices=("split", "plain"), default="split", help="as for serve")
    parser.add_argument("--head-split", choices=("on", "off"), default="off", help="as for serve")
    parser.add_argument("--graphs", choices=("on", "serial", "off"), default="on", help="as for serve")
    parser.add_argument("--delta", choices=("chunked", "recurrent"), default="chunked", help="as for serve")
    parser.add_argument("--draft-window", type=whole, default=0, help="as for serve")
    parser.add_argument("--collective", default="", metavar="CHOICE", help="what was chosen between the cards")
    parser.add_argument("--pages", type=whole, default=0, help="pages of the pool; 0: enough for every lane")
    parser.add_argument("--plain-bytes", type=whole, default=0, help="memory for plain weights that stay")
    parser.add_argument("--cpus", default="", metavar="LIST", help="CPUs near the card, with commas between")
    parser.add_argument("--prefix-bytes", type=whole, default=0, help="memory for the states of kept prefixes")
    parser.add_argument("--prefix-interval", type=whole, default=8192, help="as for serve")
    parser.add_argument("--drafts-from", type=Path, help="JSON list of lists: the drafts of each round")


def run(args: argparse.Namespace) -> int:
    from ..runtime.rank.options import RankOptions
    from ..runtime.rank.process import run_rank

    return run_rank(RankOptions(**{name: getattr(args, name) for name in RankOptions.__dataclass_fields__}))
