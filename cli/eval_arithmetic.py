"""`duovolt eval --arithmetic`: what fp16 and an int8 cache cost, on this machine's card, at depths of a long text."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import EnvironmentFault, InputError
from .numbers import cards, numbers_of, whole
from .progress import byte_bar

if TYPE_CHECKING:
    import torch

    from ..runtime.engine.cuda.loading import LoadPlan

DEFAULT_CONTEXT = 131_072
PATHS = ("fp32", "bf16", "fp16", "int8", "fp16-2", "int8-2")
USUAL, USUAL_OF_RANKS = PATHS[:4], ("fp32", "bf16", "fp16", "fp16-2")


def add_arithmetic(parser: argparse.ArgumentParser) -> None:
    """The options of the engine's arithmetic in place of a checkpoint's quality."""
    group = parser.add_argument_group("the engine's arithmetic, on a card, in place of quality")
    group.add_argument(
        "--arithmetic",
        action="store_true",
        help="divergence of the CUDA engine from the same weights in other precisions",
    )
    group.add_argument(
        "--paths", nargs="+", choices=PATHS, metavar="PATH",
        help="fp32 and bf16: the model in torch; fp16 and int8: the engine with such a cache; fp16-2 and int8-2: the same on two "
        "ranks, whose sums meet in fp16; the first is the reference of all, each of the one behind it (default: fp32 bf16 "
        "fp16 int8; with --ranks fp32 bf16 fp16 fp16-2)",
    )  # fmt: skip
    group.add_argument(
        "--ranks", type=Path, metavar="RANKS",
        help="the same conversion split over two, for fp16-2 and int8-2: both ranks on the one card, in turn",
    )  # fmt: skip
    group.add_argument(
        "--context", type=whole, metavar="N", help=f"positions at most (default: {DEFAULT_CONTEXT}, or the text)"
    )
    group.add_argument("--positions", type=whole, default=64, metavar="N", help="predictions a depth (default: 64)")
    group.add_argument("--chunk", type=whole, default=2048, metavar="N", help="tokens read at a time (default: 2048)")
    group.add_argument(
        "--device",
        type=cards(1),
        default="0",
        metavar="N",
        help="the card, or cpu for the kernels' references (default: 0)",
    )
    group.add_argument("--arch", metavar="ARCH", help="code of the kernels: compute_70 is what a V100's is made from")
    group.add_argument(
        "--random", metavar="NAME|FILE", help="random weights of a configuration's shapes, and random tokens"
    )
    group.add_argument("--layers", type=whole, metavar="N", help="with --random: only the first N layers")
    group.add_argument("--seed", type=whole, default=0, metavar="S", help="with --random (default: 0)")


def run_arithmetic(args: argparse.Namespace) -> int:
    """Raises InputError, EnvironmentFault, CheckFailed."""
    import contextlib

    import torch

    from ..kernels.module import counted_launches, forced_arch
    from ..perf.arithmetic import depths_of, study
    from ..perf.layerwise import check_arch
    from ..runtime.engine.cuda.loading import load_planned

    if args.paths is None:
        args.paths = list(USUAL if args.ranks is None else USUAL_OF_RANKS)
    _check(args)
    subject, plans = _subject(args), _ranks(args)
    device = _device(args.device)
    check_arch(args.arch, "cuda", [device])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.nullcontext() if args.arch is None else forced_arch(args.arch), counted_launches() as launches:
        context = len(subject.tokens) - args.positions - 1
        depths = depths_of(context, args.positions)
        weights, ranks = subject.load(device), [load_planned(plan, device)[0] for plan in plans]
        with byte_bar("eval", len(args.paths) * len(subject.tokens), args.quiet) as tick:
            found = study(weights, subject.tokens, depths, args.paths, subject.ids, args.chunk, tick, ranks)
    where = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    code = ", ".join(f"{count} launches of {arch} code" for arch, count in sorted(launches.items())) or "torch alone"
    if args.json:
        facts = {"model": subject.label, "device": where, "torch": str(torch.__version__), "code": dict(launches)}
        rows = [
            asdict(own) | {"pairs": {" ".join(pair): asdict(own.pairs[pair]) for pair in own.pairs}}
            for own in found.found
        ]
        print(json.dumps(facts | asdict(found) | {"found": rows}, indent=1))
    elif not args.quiet:
        print(f"{subject.label} on {where}, {code}; teacher-forced, in nats a token")
        for own in found.found:
            print(f"positions {own.depth}: entropy {own.entropy:.3f}")
            if args.random is None:
                print("  loss of the text: " + ", ".join(f"{path} {loss:.5f}" for path, loss in own.loss.items()))
            for (a, b), pair in own.pairs.items():
                print(
                    f"  KL({a} || {b}) {pair.mean:.3e}, largest {pair.largest:.3e}, same likeliest token {pair.agreement:.1%}"
                )
        print(
            "values beyond fp16, cut: "
            + (", ".join(f"{path} {n}" for path, n in found.overflows.items()) or "no engine ran")
        )
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.random is None and len(args.directories) != 1:
        raise InputError("--arithmetic takes one directory, or --random.")
    if args.random is not None and args.directories:
        raise InputError("--random is in place of a directory.")
    if args.ranks is not None and (args.random is not None or not any(path.endswith("-2") for path in args.paths)):
        raise InputError("--ranks is for the paths fp16-2 and int8-2 of a directory.")
    if args.ranks is None and (pairs := [path for path in args.paths if path.endswith("-2")]):
        raise InputError(f"--paths {pairs[0]}: give --ranks, the folder of the directory's two ranks.")
    if args.layers is not None and args.random is None:
        raise InputError("--layers needs --random.")
    if len(set(args.paths)) != len(args.paths) or len(args.paths) < 2:
        raise InputError("--paths: at least two different ones.")
    if not 1 <= args.positions <= 1024 or not 1 <= args.chunk <= 1 << 16:
        raise InputError("--positions is 1 to 1024, --chunk 1 to 65536.")
    if args.context is not None and args.context < args.positions:
        raise InputError(f"--context {args.context}: at least --positions, {args.positions}.")


def _device(wanted: str):  # type: ignore[no-untyped-def]
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise EnvironmentFault("no usable card; --device cpu runs the kernels' torch references, slowly.")
    (number,) = numbers_of(wanted)
    if number >= count:
        raise InputError(f"--device {wanted}: this machine shows {count} cards.")
    return torch.device("cuda", number)


def _ranks(args: argparse.Namespace) -> "list[LoadPlan]":
    """What is to be loaded of both ranks of --ranks, of the conversion that the directory holds. Raises as `_subject`."""
    if args.ranks is None:
        return []
    from ..checkpoint.manifest import has_manifest, read_manifest
    from ..perf.whole_model import whole_model
    from ..runtime.engine.cuda.fitness import check_fitness
    from ..runtime.engine.cuda.loading import plan_load
    from ..runtime.rank.identity import check_ranks, find_ranks

    directories = find_ranks(args.ranks, scripted=False)
    if len(directories) != 2:
        raise InputError(f"--ranks {args.ranks}: {len(directories)} rank, expected two (`duovolt shard --tp 2`).")
    identity = check_ranks(directories, scripted=False)[0]
    whole = whole_model(args.directories[0])
    if not has_manifest(whole) or read_manifest(whole).conversion_id != identity.conversion_id:
        raise InputError(f"--ranks {args.ranks} is conversion {identity.conversion_id}, which {whole} is not.")
    plans = [plan_load(directory) for directory in directories]
    check_fitness(plans[0].source.config, 2, str(directories[0]))
    return plans


@dataclass(frozen=True)
class _Subject:
    """What is studied: weights that `load` puts on a device, `ids` that can be emitted, and the text's `tokens`."""

    label: str
    load: "Callable[[torch.device], Any]"
    ids: int
    tokens: list[int]


def _subject(args: argparse.Namespace) -> _Subject:
    """Raises InputError for a directory, text or configuration at fault: told before a card is asked for."""
    import torch

    from ..convert.recipe import load_recipe
    from ..model.config import ModelConfig
    from ..perf.arithmetic import sharpened
    from ..perf.random_weights import random_weights
    from ..perf.shapes import configuration
    from ..perf.whole_model import whole_model
    from ..runtime.engine.cuda.fitness import check_fitness
    from ..runtime.engine.cuda.loading import load_planned, plan_load
    from ..runtime.engine.loading import tokenizer_ids

    if args.random is not None:
        config = ModelConfig.from_dict(configuration(args.random, args.layers), args.random)
        check_fitness(config, 1, args.random)
        count = _context(args, config, None) + args.positions + 1
        encodings = {name: encoding or "bf16" for name, encoding in load_recipe("v100").encodings(config).items()}
        generator = torch.Generator().manual_seed(args.seed)
        tokens = torch.randint(0, config.text.vocab_size, (count,), generator=generator).tolist()
        label = f"random weights of {args.random}, {config.text.num_hidden_layers} layers"
        return _Subject(
            label,
            lambda device: sharpened(random_weights(config, encodings, 1, 0, device, args.seed)),
            config.text.vocab_size,
            tokens,
        )
    directory = whole_model(args.directories[0])
    plan = plan_load(directory)
    if plan.source.tp_size != 1:
        raise InputError(
            f"{directory}: one of {plan.source.tp_size} ranks. Give a converted directory, or rank-0-of-1."
        )
    config = plan.source.config
    check_fitness(config, 1, str(directory))
    tokens = _tokens(args, directory)
    count = _context(args, config, len(tokens)) + args.positions + 1
    ids = tokenizer_ids(directory, config.text.vocab_size)
    return _Subject(directory.name, lambda device: load_planned(plan, device)[0], ids, tokens[:count])


def _tokens(args: argparse.Namespace, directory: Path) -> list[int]:
    from importlib import resources

    from ..checkpoint.directory import read_text
    from ..perf.quality import DOCUMENT_START, documents
    from ..runtime.proxy.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(directory)
    bundled = resources.files("duovolt.tiny") / "heldout.txt"
    text = bundled.read_text(encoding="utf-8") if args.text is None else read_text(args.text, 64 << 20, "a text")
    joined = "".join(DOCUMENT_START + document for document in documents(text))
    return [int(token) for token in tokenizer.encode(joined)]


def _context(args: argparse.Namespace, config, there: int | None) -> int:  # type: ignore[no-untyped-def]
    """Positions of the last depth, so that the tokens behind it are there too."""
    limit = config.text.max_position_embeddings - args.positions - 1
    if there is not None:
        limit = min(limit, there - args.positions - 1)
    wanted = min(DEFAULT_CONTEXT, limit) if args.context is None else args.context
    if wanted > limit or limit < args.positions:
        what = "the model knows" if there is None or limit + args.positions + 1 < there else "the text has"
        raise InputError(
            f"--context {wanted}: {what} {limit + args.positions + 1:,} positions, {args.positions} of which are for decoding. "
            "Give a longer --text or a smaller --context."
        )
    return wanted
