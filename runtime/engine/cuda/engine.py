"""From a rank's directory to an engine at work on a card."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ....checkpoint.errors import EnvironmentFault
from ....kernels.ops import prepare
from ...parallel.device import DeviceCollective
from ..engine import Engine
from ..loading import EngineSettings, check_settings_fit, engine_of, sampleable, tower_of
from .executor import CudaExecutor
from .fitness import check_fitness, check_limits
from .loading import load_planned, plan_load
from .selftest import check_answers


@dataclass(frozen=True)
class CudaSettings(EngineSettings):
    """Choices of this backend beside those of every engine.

    kv: `int8` or `fp16`; graphs: capture rounds; overlap: let their launches overlap; chunked_delta: prompts go through
    the delta rule 64 tokens at a time; draft_window: tokens of context that drafting looks at, 0: all; attention: `split`
    or `plain`; head_split: gather candidates in place of whole logits where they are enough; keep: bytes of plain weights that
    stay for prompts.
    """

    kv: str = "int8"
    graphs: bool = True
    overlap: bool = True
    chunked_delta: bool = True
    draft_window: int = 0
    attention: str = "split"
    head_split: bool = False
    keep: int = 0


def load_cuda_engine(
    directory: Path,
    device: torch.device,
    size: int,
    rank: int,
    link: Callable[[], DeviceCollective],
    settings: CudaSettings,
) -> tuple[Engine, dict[str, str]]:
    """Known answers, weights, caches, graphs; then the engine, and facts for the log line.

    `link` is called once the weights are there: ranks may take their time to load, and meet in it.

    Raises InputError for a directory that does not fit, CheckFailed for damaged weights or a card that computes wrongly,
    EnvironmentFault for a card whose memory is too small.
    """
    plan = plan_load(directory)
    check_settings_fit(plan.source, size, rank, settings)
    check_fitness(plan.source.config, size, str(directory))
    check_limits(settings.lanes, settings.drafts)
    ids = sampleable(directory, plan.source, settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_answers(device)
        prepare(device)  # before the ranks meet: one that compiles is late
    try:
        weights, report = load_planned(plan, device)
        tower = tower_of(directory, plan.source, weights.vision)
        executor = CudaExecutor(
            weights,
            link(),
            max_context=settings.max_context,
            lanes=settings.lanes,
            drafts=settings.drafts if settings.drafts_from is None else 0,
            n_sampleable=ids,
            pages=settings.pages,
            int8=settings.kv == "int8",
            draft_head=settings.draft_head != "off",
            draft_window=settings.draft_window,
            attention=settings.attention,
            head_split=settings.head_split,
            graphs=settings.graphs,
            overlap=settings.overlap,
            chunked_delta=settings.chunked_delta,
            keep=settings.keep,
            tower=tower,
        )
        if device.type == "cuda":
            executor.warm(settings.prefill_chunk)
    except torch.cuda.OutOfMemoryError as error:
        remedy = "--plain-weights off, a smaller" if settings.keep else "a smaller"
        raise EnvironmentFault(
            f"card {device} has no room: {str(error).splitlines()[0]} Something else may hold its memory; {remedy} "
            "--max-context or fewer --lanes need less."
        ) from None
    engine = engine_of(executor, directory, plan.source, tower, settings)
    facts = engine.facts
    facts["weights"] = f"{weights.nbytes / 1e9:.2f}GB"
    facts["load"] = f"{report.seconds:.1f}s,{report.nbytes / 1e9 / max(report.seconds, 1e-9):.1f}GB/s"
    facts["digests"] = f"{report.digest_seconds:.1f}s,waited={report.waited:.1f}s"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts["card"] = torch.cuda.get_device_name(device).replace(" ", "_")
        facts["card_memory"] = f"{(total - free) / 1e9:.2f}of{total / 1e9:.2f}GB"
    return engine, facts
