"""What each layer gives, by two backends or two widths, on the same tokens: where they part, and by how much."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from ..checkpoint.manifest import has_manifest
from ..kernels.build import options
from ..kernels.module import counted_launches, forced_arch
from ..runtime.engine.cache import Cache
from ..runtime.engine.cuda.executor import CudaExecutor
from ..runtime.engine.cuda.fitness import check_fitness
from ..runtime.engine.cuda.loading import load_cuda_weights
from ..runtime.engine.lane import Lane
from ..runtime.engine.model import Batch, Model, Segment
from ..runtime.engine.pages import PAGE, pages_for
from ..runtime.engine.sources import open_source
from ..runtime.engine.weights import load_weights
from ..runtime.messages import GenerateRequest, SamplingParams
from ..runtime.parallel.base import SoloCollective
from ..runtime.parallel.device import CpuDeviceCollective, SoloDevice
from ..runtime.parallel.mailbox import Mailbox, MailboxCollective
from ..runtime.parallel.region import Region, region_bytes
from ..runtime.rank.identity import find_ranks

BACKENDS = ("reference", "cuda")
ROUND = 4  # tokens: one and three drafts
_TWIN_SECONDS = 600.0


@dataclass(frozen=True)
class Row:
    """One layer: cosine between both outputs and |a - b| / |a|, over all tokens together, and the worst token's."""

    layer: int
    kind: str
    cosine: float
    relative: float
    worst_relative: float


@dataclass(frozen=True)
class Reading:
    """How a prompt is read: so many tokens at a time, but the last `decoded` as decode rounds of four."""

    chunk: int = 512
    decoded: int = 0

    def pieces(self, count: int) -> Iterator[tuple[slice, bool]]:
        """(tokens, whether a round reads them), in order."""
        prompt = count - self.decoded
        for start in range(0, prompt, self.chunk):
            yield slice(start, min(start + self.chunk, prompt)), False
        for start in range(prompt, count, ROUND):
            yield slice(start, min(start + ROUND, count)), True


@dataclass(frozen=True)
class Run:
    """`layers`: each layer's output, float32 [T, hidden] on the CPU; `launches`: of our kernels, by architecture of code."""

    layers: list[Tensor] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)

    @property
    def code(self) -> str:
        """What ran, in words."""
        return ", ".join(f"{count} launches of {arch} code" for arch, count in sorted(self.launches.items())) or "torch"


def check_arch(arch: str | None, backend: str, devices: list[torch.device]) -> None:
    """Raises InputError for code of an architecture that there is none of, or where no kernel would run."""
    if arch is None:
        return
    options(arch)
    if backend != "cuda" or devices[0].type != "cuda":
        where = f"on {devices[0]}" if backend == "cuda" else f"with the {backend} backend"
        raise InputError(f"code of {arch} was asked for, but {where} no kernel runs: its torch reference does.")


def directories_of(path: Path) -> list[Path]:
    """A model's directories in rank order: one of any stage, or the ranks in a folder. Raises InputError."""
    if has_manifest(path) or (path / "config.json").exists():
        return [path]
    return find_ranks(path, scripted=False)


def outputs(
    backend: str,
    directories: list[Path],
    tokens: list[int],
    devices: list[torch.device],
    kv: str = "int8",
    arch: str | None = None,
    reading: Reading | None = None,
) -> Run:
    """What rank 0's layers give for a prompt of `tokens`.

    Ranks run as threads of this process, over the CPU mailbox; `devices`: one a rank, of the cuda backend; `arch`: code of
    its kernels, None: the card's own. Raises InputError for directories that are not the ranks of one split, and what
    loading raises.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend {backend!r}: {' or '.join(BACKENDS)}.")
    check_arch(arch, backend, devices)
    if len(directories) > 2:
        raise InputError(f"{len(directories)} ranks: at most 2 are run side by side.")
    region = Region(bytearray(region_bytes()))
    found = [Run() for _ in directories]
    faults: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            mailbox = Mailbox(region, rank, _TWIN_SECONDS) if len(directories) == 2 else None
            code = contextlib.nullcontext() if arch is None else forced_arch(arch)
            with torch.inference_mode(), code, counted_launches() as launches:
                run = _reference if backend == "reference" else _cuda
                device = devices[rank % len(devices)]
                run(directories[rank], tokens, device, kv, reading or Reading(), mailbox, _keeping(found[rank].layers))
            found[rank].launches.update(launches)
        except BaseException as fault:  # told by the caller's thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(directories))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not faults:
        for thread in threads:
            thread.join(0.1)
    if faults:
        raise faults[0]
    return found[0]


def compare(a: list[Tensor], b: list[Tensor], kinds: tuple[str, ...]) -> list[Row]:
    """Layer by layer. Raises InputError for two models of different shapes."""
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        raise InputError("the two are no runs of one model: layers or their widths differ.")
    rows = []
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        x, y = left.double(), right.double()
        errors = (x - y).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-30)
        cosine = float((x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-30))
        relative = float((x - y).norm() / x.norm().clamp(min=1e-30))
        rows.append(Row(number, kinds[number], cosine, relative, float(errors.max())))
    return rows


def _keeping(found: list[Tensor]) -> Callable[[int, Tensor], None]:
    def observe(layer: int, x: Tensor) -> None:
        part = x.detach().float().cpu().clone()
        if layer < len(found):
            found[layer] = torch.cat((found[layer], part))
        else:
            found.append(part)

    return observe


def _reference(
    directory: Path,
    tokens: list[int],
    device: torch.device,
    kv: str,
    reading: Reading,
    mailbox: Mailbox | None,
    observe: Callable[[int, Tensor], None],
) -> None:
    weights, count = load_weights(open_source(directory)), len(tokens)
    model = Model(weights, SoloCollective() if mailbox is None else MailboxCollective(mailbox), count)
    model.observe = observe
    cache = Cache.for_one(weights, count)
    for part, decoded in reading.pieces(count):
        here = tokens[part]
        rope = torch.arange(part.start, part.stop).expand(3, -1)
        model.forward(Batch(torch.tensor(here), [Segment(0, part.start, len(here))], rope, by_rows=decoded), cache)
        if decoded:
            cache.commit(0, len(here))
        cache.lengths[0] = part.stop


def _cuda(
    directory: Path,
    tokens: list[int],
    device: torch.device,
    kv: str,
    reading: Reading,
    mailbox: Mailbox | None,
    observe: Callable[[int, Tensor], None],
) -> None:
    source = open_source(directory)
    check_fitness(source.config, source.tp_size, str(directory))
    weights, _ = load_cuda_weights(directory, device)
    link = SoloDevice() if mailbox is None else CpuDeviceCollective(MailboxCollective(mailbox))
    context = pages_for(len(tokens) + ROUND + 1) * PAGE
    executor = CudaExecutor(
        weights, link, max_context=context, lanes=1, drafts=0, n_sampleable=weights.config.text.vocab_size,
        int8=kv == "int8", graphs=False,
    )  # fmt: skip
    executor.model.common.observe = observe
    request = GenerateRequest(1, tokens, ROUND + 1, [], True, SamplingParams(temperature=0.0))
    lane = Lane(0, request, ROUND + 1, list(range(executor.pages)))
    executor.open(lane)
    for part, decoded in reading.pieces(len(tokens)):
        if decoded:
            executor.feed(lane, part.start, tokens[part])
            continue
        executor.prefill(lane, part.start, part.stop - part.start)
        lane.read = part.stop
    executor.close(lane)
