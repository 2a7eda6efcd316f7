"""The options of one rank process: written by the proxy as arguments, read back by `duovolt rank`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankOptions:
    """`exchange_seconds` bounds every wait for the twin; `sampleable` is the number of ids that the tokenizer can emit;
    `ends` are those that end an answer, with commas between. Of the CUDA backend: `device`, `kv`, `attention`,
    `head_split`, `graphs`, `delta`, `draft_window`; `pages` of the pool, 0: enough for every lane; `plain_bytes` of memory
    for plain weights that stay; `cpus` near the card, with commas between; `collective`: the argument of the chosen way between
    two cards, empty: the mailbox in host memory."""

    dir: Path
    rank: int
    size: int
    endpoint: str
    shared: str
    parent: int
    backend: str
    max_context: int
    lanes: int
    drafts: int
    prefill_chunk: int
    sampleable: int
    exchange_seconds: float
    drafts_from: Path | None = None
    ends: str = ""
    draft_head: str = "auto"
    device: str = "cpu"
    kv: str = "int8"
    attention: str = "split"
    head_split: str = "off"
    graphs: str = "on"
    delta: str = "chunked"
    draft_window: int = 0
    collective: str = ""
    pages: int = 0
    plain_bytes: int = 0
    cpus: str = ""
    prefix_bytes: int = 0
    prefix_interval: int = 8192

    def arguments(self) -> list[str]:
        """The command line after `duovolt rank`."""
        words: list[str] = []
        for name, value in vars(self).items():
            if value is not None and value != "":
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words
