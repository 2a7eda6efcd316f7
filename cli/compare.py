"""`duovolt compare`: layer by layer, two backends or two widths."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckFailed, InputError
from .numbers import cards, decimal, numbers_of, whole
from .reads import ALWAYS, Condition, Reads, valued, without

EXAMPLE = """examples:
  duovolt compare ranks/rank-0-of-1 --a reference --b cuda
  duovolt compare ranks1 ranks2 --a cuda --b cuda --devices 0,1
  duovolt compare converted ranks2 --a reference --b reference --tokens 300
  duovolt compare ranks1 --a cuda --b cuda --arch-b compute_70 --decode 32

Both read the same prompt; the table has, for each layer, the cosine between their outputs and |a - b| / |a|. A folder of two
ranks runs both, side by side in this process. A chunk of more than 96 tokens is multiplied by the vendor's library, one of
up to 96 and every round by our own kernels: two builds of them show their difference there. The line above the table counts
what ran."""


_ON_CARDS = Condition("with --a cuda or --b cuda", lambda args: "cuda" in (args.a, args.b))
READS = Reads(
    {
        ALWAYS: "directory second a b text tokens chunk decode most json",
        without("text"): "seed",
        _ON_CARDS: "devices kv",
        valued("devices", "cpu"): "devices",  # where the reference is anyway
        valued("a", "cuda"): "arch_a",
        valued("b", "cuda"): "arch_b",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a model: one directory of any stage, or a folder of ranks"
    )
    parser.add_argument("second", type=Path, nargs="?", metavar="DIR2", help="the other one (default: DIR)")
    parser.add_argument(
        "--a", choices=("reference", "cuda"), default="reference", help="backend of DIR (default: reference)"
    )
    parser.add_argument("--b", choices=("reference", "cuda"), default="cuda", help="backend of DIR2 (default: cuda)")
    parser.add_argument(
        "--devices", type=cards(2), metavar="N[,N]", help="cards of the cuda backend, or cpu (default: cards)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="the prompt; without it, random tokens")
    parser.add_argument(
        "--tokens", type=whole, default=128, metavar="N", help="length of the prompt at most (default: 128)"
    )
    parser.add_argument(
        "--chunk", type=whole, default=512, metavar="N", help="tokens of the prompt read at a time (default: 512)"
    )
    parser.add_argument(
        "--decode",
        type=whole,
        default=0,
        metavar="N",
        help="read the last N tokens in decode rounds of four (default: 0)",
    )
    parser.add_argument("--seed", type=whole, default=0, help="of random tokens (default: 0)")
    parser.add_argument(
        "--kv", choices=("int8", "fp16"), default="int8", help="cache of the cuda backend (default: int8)"
    )
    for side in "ab":
        parser.add_argument(
            f"--arch-{side}",
            metavar="ARCH",
            help=f"code of {side}'s kernels: compute_70 is what a V100's is made from (default: the card's own)",
        )
    parser.add_argument("--most", type=decimal, metavar="X", help="exit with 1 if any layer's |a - b| / |a| is above X")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    from ..model.config import ModelConfig
    from ..perf.layerwise import Reading, check_arch, compare, directories_of, outputs

    if args.tokens < 1:
        raise InputError(f"--tokens {args.tokens}: expected at least 1.")
    if not 1 <= args.chunk <= 1 << 16:
        raise InputError(f"--chunk {args.chunk}: expected 1 to {1 << 16}.")
    if not 0 <= args.decode < args.tokens:
        raise InputError(f"--decode {args.decode}: expected fewer than --tokens, {args.tokens}.")
    first = directories_of(args.directory)
    second = first if args.second is None else directories_of(args.second)
    config = ModelConfig.read(first[0])
    if args.tokens > config.text.max_position_embeddings:
        raise InputError(f"--tokens {args.tokens}: the model knows {config.text.max_position_embeddings} positions.")
    tokens = _prompt(args, first[0], config.text.vocab_size)
    devices = _devices(args.devices, _ranks_on_cards(args, first, second))
    for backend, arch in ((args.a, args.arch_a), (args.b, args.arch_b)):
        check_arch(arch, backend, devices)
    reading = Reading(args.chunk, min(args.decode, len(tokens) - 1))
    a = outputs(args.a, first, tokens, devices, args.kv, args.arch_a, reading)
    b = outputs(args.b, second, tokens, devices, args.kv, args.arch_b, reading)
    found = compare(a.layers, b.layers, config.text.layer_types)
    worst = max(found, key=lambda row: row.relative)
    facts = {
        "a": {"backend": args.a, "ranks": len(first), "launches": dict(a.launches)},
        "b": {"backend": args.b, "ranks": len(second), "launches": dict(b.launches)},
        "device": str(devices[0]), "tokens": len(tokens), "layers": [asdict(row) for row in found],
    }  # fmt: skip
    if args.json:
        print(json.dumps(facts, indent=1))
    elif not args.quiet:
        print(f"{args.a} x {len(first)} and {args.b} x {len(second)} on {devices[0]}, {len(tokens)} tokens")
        print(f"a ran {a.code}; b ran {b.code}")
        print("layer  kind                   cosine      |a-b|/|a|   worst token")
        for row in found:
            print(f"{row.layer:>5}  {row.kind:<17}  {row.cosine:.9f}  {row.relative:12.3e}  {row.worst_relative:12.3e}")
        print(f"largest |a-b|/|a|: {worst.relative:.3e} in layer {worst.layer}")
    if args.most is not None and not worst.relative <= args.most:
        raise CheckFailed(f"layer {worst.layer}: |a - b| / |a| is {worst.relative:.3e}, more than {args.most:g}.")
    return 0


def _prompt(args: argparse.Namespace, directory: Path, vocabulary: int) -> list[int]:
    import torch

    from ..checkpoint.directory import read_text
    from ..runtime.engine.loading import tokenizer_ids

    if args.text is None:
        ids = tokenizer_ids(directory, vocabulary)
        generator = torch.Generator().manual_seed(args.seed)
        return [int(token) for token in torch.randint(0, ids, (args.tokens,), generator=generator)]
    from ..runtime.proxy.tokenizer import TextTokenizer

    tokens = TextTokenizer(directory).encode(read_text(args.text, 64 << 20, "a prompt"))[: args.tokens]
    if not tokens:
        raise InputError(f"--text {args.text}: holds no text.")
    return [int(token) for token in tokens]


def _ranks_on_cards(args: argparse.Namespace, first: list[Path], second: list[Path]) -> int:
    """Of the wider of the sides that the cuda backend runs."""
    sides = ((args.a, first), (args.b, second))
    return max((len(directories) for backend, directories in sides if backend == "cuda"), default=1)


def _devices(wanted: str | None, ranks: int) -> list[Any]:
    """torch devices of the ranks, of which the wider side has so many."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return [torch.device("cuda", number) for number in range(min(2, count))] or [torch.device("cpu")]
    if wanted == "cpu":
        return [torch.device("cpu")]
    numbers = numbers_of(wanted)
    if len(numbers) > ranks:
        raise InputError(
            f"--devices {wanted}: more cards than ranks, of which there {'is' if ranks == 1 else 'are'} {ranks}."
        )
    if max(numbers) >= count:
        raise InputError(f"--devices {wanted}: this machine shows {count} cards.")
    return [torch.device("cuda", number) for number in numbers]
