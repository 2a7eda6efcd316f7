"""`duovolt bench engine`."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.directory import require_report_place, write_report
from ..checkpoint.errors import InputError, without_effect
from .numbers import cards, decimal, memory_or_auto, numbers_of, whole
from .reads import ALWAYS, Condition, Reads, given, spelled, valued, without

EXAMPLE = """examples:
  duovolt bench engine
  duovolt bench engine --tp 2 --contexts 8192 131072 --lanes 1 2 --json engine.json
  duovolt bench engine --devices 0,1
  duovolt bench engine --dir ranks --devices 0,1 --prefill 8192

Decode rounds and first tokens of one rank on a card, as the engine runs them, over random weights in the encodings of a
recipe (or a rank directory). --devices 0,1 runs both ranks of two; --tp 2 on one card measures one rank of two without its
twin: sums are its own part. `floor`: every large read at the speed of a plain read of its bytes, and every exchange, both
measured in the same run (without a twin: --collective-us an exchange); of a first token, every product and attention at the
rate of the vendor's fp16 product. Depths are filled with random keys and values, and drafts are forced to stand. The
kernels' times come from a profiled pass of its own."""


_TWO_CARDS = Condition("with two --devices", lambda args: "," in args.devices)
_ONE_CARD = Condition("with one of --devices", lambda args: "," not in args.devices)
_TWO_RANKS = Condition(  # how many --dir is of, `_check` sees
    "with two ranks", lambda args: "," in args.devices or args.tp == 2 or args.dir
)
_ON_CARD = Condition("on cards", lambda args: args.devices != "cpu")
_SUITING = Condition("with one of --devices (two have 2)", lambda args: "," not in args.devices or args.tp == 2)
READS = Reads(
    {
        ALWAYS: "dir devices twin way contexts lanes drafts rounds prefill chunk kv attention no_profile json",
        without("dir"): "config recipe layers draft_rows",
        without("dir") & _SUITING: "tp",
        _TWO_CARDS: "collective",
        _ONE_CARD & _TWO_RANKS & _ON_CARD: "collective_us",
        _TWO_RANKS: "head_split",
        given("drafts"): "draft_window",
        _ON_CARD: "arch graphs plain_weights",
        valued("graphs", "off"): "graphs",  # as it is without a card
    },
    judged="twin",
    contrary={_TWO_CARDS: "tp"},
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--config", default="qwen3.8-27b", metavar="NAME", help="known name or config.json (qwen3.8-27b)"
    )
    parser.add_argument("--recipe", default="v100", help="decides the encodings (default: v100)")
    parser.add_argument("--layers", type=whole, metavar="N", help="only the first N layers")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="a rank or converted directory in place of random weights"
    )
    parser.add_argument(
        "--devices",
        type=cards(2),
        default="0",
        metavar="N[,N]",
        help="cards; two run both ranks of two (default: 0); cpu: only to try the command, on the kernels' references",
    )
    parser.add_argument("--collective", choices=("auto", "host", "ipc", "nccl"), default="auto", help="as for serve")
    parser.add_argument("--twin", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=whole, default=1, choices=(1, 2), help="ranks that share the model (default: 1)")
    parser.add_argument(
        "--draft-rows", type=whole, default=0, metavar="N", help="rows of a reduced draft head (default: none)"
    )
    parser.add_argument("--contexts", type=whole, nargs="*", default=[8192, 32768, 131072, 262144], metavar="N")
    parser.add_argument(
        "--lanes", type=whole, nargs="+", default=[1, 2], metavar="N", help="1 to 4 each (default: 1 2)"
    )
    parser.add_argument(
        "--drafts", type=whole, default=3, metavar="N", help="drafts that stand each round (default: 3)"
    )
    parser.add_argument("--rounds", type=whole, default=40, metavar="N", help="timed rounds (default: 40)")
    parser.add_argument("--prefill", type=whole, nargs="*", default=[8192, 32768, 131072], metavar="N")
    parser.add_argument("--chunk", type=whole, default=2048, metavar="N", help="prompt tokens a step (default: 2048)")
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8")
    parser.add_argument(
        "--attention", choices=("split", "plain"), default="split", help="as for serve (default: split)"
    )
    parser.add_argument("--head-split", choices=("on", "off"), default="off", help="as for serve (default: off)")
    parser.add_argument("--graphs", choices=("on", "serial", "off"), default="on", help="as for serve (default: on)")
    parser.add_argument("--draft-window", type=whole, default=0, metavar="N", help="as for serve (default: 0)")
    parser.add_argument("--plain-weights", type=memory_or_auto, metavar="SIZE", help="as for serve (default: auto)")
    parser.add_argument(
        "--arch", metavar="ARCH", help="code to run, as compute_70, which a V100 gets (default: the card's own)"
    )
    parser.add_argument(
        "--collective-us",
        type=decimal,
        default=0.0,
        metavar="US",
        help="of one exchange, for the floor of --tp 2 alone",
    )
    parser.add_argument("--no-profile", action="store_true", help="no breakdown by kernel")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure; `duovolt predict --check` reads it"
    )


def run(args: argparse.Namespace) -> int:
    from ..kernels.module import forced_arch

    _check(args)
    with forced_arch(args.arch) if args.arch else nullcontext():
        from ..perf.pair import Partner, twin, way_between, words_of

        if args.twin:
            args.twin = Partner.first(args.twin)
            return _measure(args)
        if "," not in args.devices:
            return _measure(args)
        devices = numbers_of(args.devices)
        args.tp, args.way = 2, way_between(args.collective, devices).argument
        with twin(words_of("engine", args)) as partner:
            args.twin = partner
            return _measure(args, rank=0)


def _measure(args: argparse.Namespace, rank: int = 1) -> int:
    """As rank `rank`, where there are two."""
    from ..perf.engine import RoundFigures

    setup = _Setup(args, rank if args.twin else 0)
    if not args.quiet:
        print(setup.headline, flush=True)
    rounds: list[dict[str, Any]] = []
    for context in args.contexts:
        for lanes in args.lanes:
            found: RoundFigures = setup.rounds(context, lanes)
            floor = setup.floor(found)
            figures = asdict(found)
            figures |= figures.pop("seen")
            ratio = found.ms / floor if floor else None
            rounds.append(figures | {"floor_ms": floor, "ratio": ratio, "tp": args.tp, "kv": args.kv})
            if not args.quiet:
                print(_round_line(rounds[-1]), flush=True)
    prompts = []
    for tokens in args.prefill:
        seen = setup.prefill(tokens)
        floor = setup.prompt_floor(tokens)
        prompts.append(asdict(seen) | {"floor_seconds": floor})
        if not args.quiet:
            print(
                f"first token after {seen.tokens:>7,}: {seen.seconds:8.2f} s  {seen.tokens / seen.seconds:9,.0f} tokens/s  "
                f"{f'floor {floor:7.2f} s  ratio {seen.seconds / floor:.2f}  ' if floor else ''}overflows {seen.overflows}",
                flush=True,
            )
    overlap = setup.overlap()
    memory = setup.memory()
    if not args.quiet:
        if overlap is not None:
            print(
                f"a chunk of {args.chunk:,}: {overlap.whole:.1f} ms, exchanges {overlap.exchange:.1f} ms, of which "
                f"{overlap.hidden:.1f} beside computation; nothing runs for {overlap.idle:.1f} ms"
            )
        print("\n".join(_kernel_lines(rounds[0]) if rounds else []))
        if memory["used"] is not None:
            print(f"memory: planned {memory['planned'] / 1e9:.2f} GB, used {memory['used'] / 1e9:.2f} GB")
    if args.json is not None:
        facts = {
            **setup.facts,
            "rounds": rounds,
            "prefill": prompts,
            "overlap": overlap and asdict(overlap),
            "memory": memory,
        }
        write_report(args.json, facts)
    setup.close()
    return 0


class _Setup:
    """The executor under measurement and what is known of it."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        import torch

        from ..kernels.prefill_attention import torch_attends
        from ..kernels.tuning import choice_on
        from ..perf.engine import Alone, Bench, product_rate, read_curve_here
        from ..perf.model_source import sheet_at
        from ..perf.sheet import sheet_of
        from ..runtime.engine.cuda.executor import CudaExecutor
        from ..runtime.engine.cuda.plan import MARGIN, Demand, plan_memory, room_to_keep
        from ..runtime.engine.pages import pages_for
        from ..runtime.parallel.choice import Choice
        from ..runtime.parallel.device import DeviceCollective, SoloDevice

        self._args, self._torch, self._card = args, torch, args.devices != "cpu"
        self._curve: Any = None
        self._exchanges: dict[tuple[str, int, int], float] = {}
        self.close: Callable[[], None] = lambda: None
        device = torch.device("cpu")
        if self._card:
            device = _card(numbers_of(args.devices)[rank], args)
            self._curve = read_curve_here(device) if rank == 0 else read_curve_here(device, [1 << 20])
            self._rate = product_rate(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._begun = torch.cuda.memory_reserved(device)
        self._device, load = device, ""
        if args.dir is not None:
            from ..runtime.engine.cuda.loading import load_cuda_weights

            directory = _directory(args, rank)
            weights, report = load_cuda_weights(directory, device)
            self._sheet, load = sheet_at(str(directory), None, None), str(report)
            args.tp = weights.tp_size
        else:
            from ..perf.random_weights import random_weights

            config, encodings = _configured(args)
            weights = random_weights(config, encodings, args.tp, rank, device)
            self._sheet = sheet_of(f"{args.config}, recipe {args.recipe}", config, encodings, args.tp)
        lanes, limit = max(args.lanes), weights.config.text.max_position_embeddings
        wanted = max([*args.contexts, *args.prefill, 64])
        self._context = min(limit, wanted + self._steps * (1 + args.drafts) + 64)
        share = pages_for(self._context)
        self._demand = Demand(
            weights.config, args.tp, weights.nbytes, args.kv, lanes, args.drafts, args.chunk,
            keys_in_a_row=self._card and torch_attends(torch.cuda.get_device_capability(device)),
            captured=self._card and args.graphs != "off",
            ahead=choice_on(device).layers_ahead(torch.cuda.get_device_capability(device)) if self._card else 0.0,
            keep=args.plain_weights,
        )  # fmt: skip
        self._plan = plan_memory(self._demand, self._context, lanes * share)
        if self._card:
            torch.cuda.empty_cache()
            left = torch.cuda.mem_get_info(device)[0] + weights.nbytes - MARGIN - self._plan.total
            kept = room_to_keep(self._demand, left)
            self._plan = plan_memory(self._demand, self._context, lanes * share, kept)
        link: DeviceCollective = SoloDevice() if args.tp == 1 else Alone(args.tp, weights.tp_rank)
        if args.twin:
            from ..perf.exchanges import measure_exchanges, messages_of
            from ..perf.pair import join, part

            link, meet = join(args.twin, rank, Choice.parse(args.way), device)
            self.close = partial(part, link, meet)
            ledgers = [self._ledger(1, lanes, args.drafts) for lanes in args.lanes]
            self._exchanges = measure_exchanges(messages_of(ledgers), link, meet, device)
        executor = CudaExecutor(
            weights,
            link,
            max_context=self._context,
            lanes=lanes,
            drafts=args.drafts,
            n_sampleable=weights.config.text.vocab_size,
            pages=lanes * share,
            int8=args.kv == "int8",
            draft_window=args.draft_window,
            keep=self._plan.kept,
            attention=args.attention,
            head_split=args.head_split == "on",
            graphs=args.graphs != "off",
            overlap=args.graphs == "on",
        )
        executor.capture_chunks(args.chunk)
        self._bench = Bench(executor, lanes, self._context)
        self.facts = {
            "machine": _machine(device) if self._card else {"card": "none: references on the CPU", "torch": torch.__version__},
            "model": self._sheet.label, "tp": args.tp, "kv": args.kv, "drafts": args.drafts, "chunk": args.chunk,
            "choices": executor.facts, "draft_rows": args.draft_rows, "draft_window": args.draft_window,
            "arch": args.arch, "graphs": args.graphs, "collective_us": args.collective_us, "load": load,
            "devices": args.devices, "collective": args.way if args.twin else None,
            "exchange_us": [[*message, 1e6 * seconds] for message, seconds in self._exchanges.items()],
            "weights_bytes": weights.nbytes, "plan": self._plan.parts,
            "product_tflops": self._rate / 1e12 if self._card else None,
            "curve": [] if self._curve is None else [[point.nbytes, point.gbps] for point in self._curve.points],
        }  # fmt: skip

    @property
    def headline(self) -> str:
        from ..perf.choices import named_choices

        facts = self.facts
        alone = ""
        if self._args.tp == 2:
            way = f", both ranks on cards {self._args.devices} through {self._args.way}"
            alone = way if self._args.twin else ", one rank of two without its twin"
        load = f"\n{facts['load']}" if facts["load"] else ""
        clock = f", memory at {mhz} MHz" if (mhz := facts["machine"].get("memory_mhz")) else ""
        return (
            f"{facts['machine']['card']}{clock}, driver {facts['machine'].get('driver')}, torch {facts['machine']['torch']}; "
            f"{facts['model']}{alone}; {facts['weights_bytes'] / 1e9:.2f} GB of weights, {facts['drafts']} drafts, "
            f"{', '.join(named_choices(facts['choices']))}{f', kernels {arch}' if (arch := facts['arch']) else ''}{load}"
        )

    @property
    def _steps(self) -> int:
        return self._args.rounds + 24

    def rounds(self, context: int, lanes: int) -> Any:
        depth = min(context, self._context - self._steps * (1 + self._args.drafts) - 8)
        with self._torch.inference_mode():
            return self._bench.rounds(
                depth, lanes, self._args.drafts, self._args.rounds, profile=self._card and not self._args.no_profile
            )

    def prefill(self, tokens: int) -> Any:
        with self._torch.inference_mode():
            self._bench.prefill(min(tokens, 3 * self._args.chunk), self._args.chunk)  # kernels and library handles
            return self._bench.prefill(tokens, self._args.chunk)

    def floor(self, found: Any) -> float | None:
        from ..perf.engine import floor_of
        from ..perf.exchanges import seconds_of

        if self._curve is None:
            return None
        measured, alone = self._exchanges, 1e-6 * self._args.collective_us
        ledger = self._ledger(found.context, found.lanes, found.drafts)
        return floor_of(ledger, self._curve, lambda launch: seconds_of(launch, measured) if measured else alone)

    def _ledger(self, context: int, lanes: int, drafts: int) -> Any:
        from ..perf.ledger import Shape, ledger_of

        return ledger_of(
            self._sheet, Shape(context, drafts, lanes, self._args.kv, head_split=self._args.head_split == "on")
        )

    def overlap(self) -> Any:
        """Of a chunk at the longest prompt's half; None without a twin or a profile."""
        if not self._args.twin or self._args.no_profile or not self._args.prefill:
            return None
        with self._torch.inference_mode():
            return self._bench.chunk_overlap(
                max(0, max(self._args.prefill) // 2 - 2 * self._args.chunk), self._args.chunk
            )

    def prompt_floor(self, tokens: int) -> float | None:
        """Seconds of a prompt's products and attention at the rate of the vendor's fp16 product."""
        from ..perf.engine import prompt_operations

        return prompt_operations(self._sheet, tokens) / self._rate if self._card else None

    def memory(self) -> dict[str, Any]:
        used = self._torch.cuda.max_memory_reserved(self._device) - self._begun if self._card else None
        return {"planned": self._plan.total, "used": used, "parts": self._plan.parts}


def _card(number: int, args: argparse.Namespace) -> Any:
    """The torch device of a card by number, made the current one."""
    import torch

    from ..perf.kernels import the_device

    the_device()
    if number >= torch.cuda.device_count():
        raise InputError(f"--devices {args.devices}: this machine shows {torch.cuda.device_count()} cards.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _machine(device: Any) -> dict[str, Any]:
    from ..perf.machine import read_machine

    machine = read_machine(device)
    names = ("card", "driver", "torch", "cuda", "memory_mhz", "date", "duovolt")
    return {name: getattr(machine, name) for name in names}


def _configured(args: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """Configuration and encodings of the model by name."""
    from ..checkpoint.manifest import DRAFT_HEAD
    from ..convert.recipe import load_recipe
    from ..model.config import ModelConfig
    from ..model.inventory import DRAFT_IDS, head_of
    from ..perf.shapes import configuration

    recipe = load_recipe(args.recipe)
    config = ModelConfig.from_dict(configuration(args.config, args.layers), args.config)
    config = replace(config, vision=None)
    encodings = {name: encoding or "bf16" for name, encoding in recipe.encodings(config).items()}
    if rows := args.draft_rows or recipe.draft_head:
        config = config.with_draft_head(rows)
        encodings |= {DRAFT_HEAD: encodings[head_of(config)], DRAFT_IDS: "int32"}
    return config, encodings


def _check(args: argparse.Namespace) -> None:
    if not all(1 <= lanes <= 4 for lanes in args.lanes) or not 0 <= args.drafts <= 5:
        raise InputError("--lanes are from 1 to 4, --drafts from 0 to 5.")
    if not all(64 <= n <= 1 << 20 for n in [*args.contexts, *args.prefill]) or not 10 <= args.rounds <= 10_000:
        raise InputError("--contexts and --prefill are from 64 to 1048576 tokens, --rounds from 10 to 10000.")
    if (
        not 1 <= args.chunk <= 1 << 16
        or not 0 <= args.collective_us < 1e6
        or min(args.draft_rows, args.draft_window) < 0
    ):
        raise InputError(
            "--chunk is from 1 to 65536, --collective-us below a second, none of these, --draft-rows and --draft-window "
            "negative."
        )
    from ..kernels.build import options
    from ..perf.model_source import sheet_at

    require_report_place(args.json, [args.dir])
    if args.arch is not None:
        options(args.arch)
    if args.dir is None:
        _configured(args)
    else:
        if sheet_at(str(_directory(args, 0)), None, None).tp == 1:
            for name in (
                name for name, idle in (("head_split", "off"), ("collective_us", 0)) if getattr(args, name) != idle
            ):
                raise without_effect(
                    spelled(name), f"{args.dir} is one rank, which has the whole head and exchanges nothing"
                )


def _directory(args: argparse.Namespace, rank: int) -> Path:
    """What a rank reads of --dir. Raises InputError for one that has none for it."""
    from ..perf.layerwise import directories_of

    directories = directories_of(args.dir)
    if (wanted := args.devices.count(",") + 1) > len(directories):
        raise InputError(f"--dir {args.dir}: {len(directories)} rank for {wanted} cards.")
    return directories[rank]


def _round_line(row: dict[str, Any]) -> str:
    idle = "" if row["idle"] is None else f"  idle {100 * row['idle']:4.1f} %"
    families = "  ".join(f"{name} {ms:.2f}" for name, ms in sorted(row["families"].items(), key=lambda item: -item[1]))
    floor = f"  floor {row['floor_ms']:7.3f}  ratio {row['ratio']:.2f}" if row["floor_ms"] else ""
    return (
        f"{row['context']:>7,} x {row['lanes']}  {row['ms']:7.3f} ms ({row['ms_low']:.3f} to {row['ms_high']:.3f})"
        f"{floor}{idle}  {families}"
    )


def _kernel_lines(row: dict[str, Any], most: int = 24) -> list[str]:
    """The longest kernels of the first row."""
    lines = [f"kernels at {row['context']:,} x {row['lanes']}, a round:"]
    for name, (launches, ms) in list(row["kernels"].items())[:most]:
        lines.append(f"  {ms:8.4f} ms  {launches:6.1f} x  {name[:90]}")
    return lines if row["kernels"] else []
