"""Which engine a rank runs: the torch reference, or a script."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ... import __version__
from ...checkpoint.errors import EnvironmentFault, InputError
from ..grammar import prepare
from ..parallel.base import Collective, SoloCollective
from ..parallel.mailbox import Mailbox, MailboxCollective
from .identity import TOKENIZER
from .loop import SteppingEngine
from .options import RankOptions
from .scripted import ScriptedEngine, read_script

SUPPORTED = "auto, reference, scripted:FILE"


@dataclass(frozen=True)
class Backend:
    """A chosen backend; `script` is the file of the scripted one."""

    name: str
    script: Path | None = None

    @property
    def argument(self) -> str:
        return self.name if self.script is None else f"{self.name}:{self.script}"


def choose_backend(text: str) -> Backend:
    """The backend that `--backend` names. Raises InputError (unknown, bad script) or EnvironmentFault (not on this machine)."""
    name, colon, rest = text.partition(":")
    if name == "scripted" and rest:
        script = Path(rest).absolute()
        read_script(script)
        return Backend("scripted", script)
    if colon or name not in ("auto", "reference", "cuda"):
        raise InputError(f"--backend {text}: expected one of {SUPPORTED}.")
    if name == "cuda":
        raise EnvironmentFault(f"--backend cuda: this version has no CUDA engine; supported: {SUPPORTED}.")
    return Backend("reference")


def build_engine(options: RankOptions, mailbox: Mailbox | None) -> tuple[SteppingEngine, dict[str, str]]:
    """The engine of this rank and the facts about it for the log line."""
    backend = choose_backend(options.backend)
    if backend.script is not None:
        return ScriptedEngine(read_script(backend.script), options.lanes, mailbox), {"kv": "none"}
    return _reference(options, SoloCollective() if mailbox is None else MailboxCollective(mailbox))


def _reference(options: RankOptions, collective: Collective) -> tuple[SteppingEngine, dict[str, str]]:
    import torch

    from ..engine.loading import DraftHeadChoice, EngineSettings, load_engine

    torch.set_num_threads(1)
    if (options.dir / TOKENIZER).exists():
        prepare(options.dir / TOKENIZER, options.sampleable, [int(word) for word in options.ends.split(",") if word])
    settings = EngineSettings(
        max_context=options.max_context,
        lanes=options.lanes,
        drafts=options.drafts,
        n_sampleable=options.sampleable,
        prefill_chunk=options.prefill_chunk,
        drafts_from=None if options.drafts_from is None else json.loads(options.drafts_from.read_bytes()),
        draft_head=cast(DraftHeadChoice, options.draft_head),
    )
    engine = load_engine(options.dir, collective, settings)
    return engine, dict(engine.executor.facts)


def versions(backend: str) -> dict[str, str]:
    """Versions that must be equal on both ranks."""
    found = {"duovolt": __version__, "python": sys.version.split()[0]}
    if not backend.startswith("scripted"):
        import torch
        from llguidance import __version__ as llguidance

        found["llguidance"] = llguidance  # masks of allowed tokens are computed on each rank
        found["torch"] = str(torch.__version__)  # a subclass of str, which msgpack refuses
    return found
