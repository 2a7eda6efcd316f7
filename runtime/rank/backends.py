"""Which engine a rank runs: the kernels on a card, the torch reference, or a script."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...checkpoint.errors import InputError
from ..grammar import prepare
from ..parallel.base import SoloCollective
from ..parallel.mailbox import Mailbox, MailboxCollective
from .identity import TOKENIZER
from .loop import SteppingEngine
from .options import RankOptions
from .scripted import ScriptedEngine, read_script

SUPPORTED = "auto, cuda, reference, scripted:FILE"
LOADING_SECONDS = 3600.0  # one rank's disk may be slower than the other's; the proxy ends both if one fails


@dataclass(frozen=True)
class Backend:
    """A backend; `script` is the file of the scripted one. `auto` is still to be settled: cuda or reference."""

    name: str
    script: Path | None = None

    @property
    def argument(self) -> str:
        return self.name if self.script is None else f"{self.name}:{self.script}"


def choose_backend(text: str) -> Backend:
    """The backend that `--backend` names. Raises InputError for an unknown one or a bad script."""
    name, colon, rest = text.partition(":")
    if name == "scripted" and rest:
        script = Path(rest).absolute()
        read_script(script)
        return Backend("scripted", script)
    if colon or name not in ("auto", "reference", "cuda"):
        raise InputError(f"--backend {text}: expected one of {SUPPORTED}.")
    return Backend(name)


def build_engine(options: RankOptions, mailbox: Mailbox | None) -> tuple[SteppingEngine, dict[str, str]]:
    """The engine of this rank and the facts about it for the log line."""
    backend = choose_backend(options.backend)
    if backend.script is not None:
        return ScriptedEngine(read_script(backend.script), options.lanes, mailbox), {
            "kv": "none",
            "collective": _exchange(mailbox),
        }
    if (options.dir / TOKENIZER).exists():
        prepare(options.dir / TOKENIZER, options.sampleable, [int(word) for word in options.ends.split(",") if word])
    return (_cuda if backend.name == "cuda" else _reference)(options, mailbox)


def _exchange(mailbox: Mailbox | None) -> str:
    return "solo" if mailbox is None else "mailbox-cpu"


def _settings(options: RankOptions) -> dict[str, Any]:
    """What every engine is told."""
    return {
        "max_context": options.max_context,
        "lanes": options.lanes,
        "drafts": options.drafts,
        "n_sampleable": options.sampleable,
        "prefill_chunk": options.prefill_chunk,
        "drafts_from": None if options.drafts_from is None else json.loads(options.drafts_from.read_bytes()),
        "draft_head": options.draft_head,
        "pages": options.pages or None,
        "prefix_bytes": options.prefix_bytes,
        "prefix_interval": options.prefix_interval,
    }


def _reference(options: RankOptions, mailbox: Mailbox | None) -> tuple[SteppingEngine, dict[str, str]]:
    import torch

    from ..engine.loading import EngineSettings, load_engine

    torch.set_num_threads(1)
    collective = SoloCollective() if mailbox is None else MailboxCollective(mailbox)
    engine = load_engine(options.dir, collective, EngineSettings(**_settings(options)))
    return engine, engine.facts | {"collective": _exchange(mailbox)}


def _cuda(options: RankOptions, mailbox: Mailbox | None) -> tuple[SteppingEngine, dict[str, str]]:
    import torch

    from ..engine.cuda.engine import CudaSettings, load_cuda_engine
    from ..parallel.choice import Choice
    from ..parallel.device import CpuDeviceCollective, DeviceCollective, SoloDevice
    from ..parallel.ways import open_way

    torch.set_num_threads(1)
    if options.cpus:
        os.sched_setaffinity(0, {int(word) for word in options.cpus.split(",")})

    def link() -> DeviceCollective:
        if mailbox is None:
            return SoloDevice()
        mailbox.meet(LOADING_SECONDS)
        if not options.collective:
            return CpuDeviceCollective(MailboxCollective(mailbox))
        return open_way(Choice.parse(options.collective), mailbox, device, options.exchange_seconds)

    device = torch.device(options.device)
    settings = CudaSettings(
        **_settings(options),
        kv=options.kv,
        graphs=options.graphs != "off",
        overlap=options.graphs == "on",
        chunked_delta=options.delta == "chunked",
        draft_window=options.draft_window,
        keep=options.plain_bytes,
        attention=options.attention,
        head_split=options.head_split == "on",
    )
    return load_cuda_engine(options.dir, device, options.size, options.rank, link, settings)


def versions(backend: str) -> dict[str, str]:
    """Versions that must be equal on both ranks."""
    found = {"duovolt": __version__, "python": sys.version.split()[0]}
    if not backend.startswith("scripted"):
        import torch
        from llguidance import __version__ as llguidance

        found["llguidance"] = llguidance  # masks of allowed tokens are computed on each rank
        found["torch"] = str(torch.__version__)  # a subclass of str, which msgpack refuses
    return found
