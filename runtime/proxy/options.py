"""The options of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

FOR_CARDS = ("kv", "attention", "head_split", "graphs", "delta", "draft_window", "collective", "plain_weights")


@dataclass(frozen=True)
class ServeOptions:
    """As `duovolt serve --help` tells.

    `max_context` 0 is `auto`: on cards the longest that fits, else as None, the model's own limit, at most 32768 (on cards
    None is `auto`). `devices`: numbers of cards, or `cpu`; None: the first ones. `prefix_cache`: bytes; 0 keeps no
    prefixes. `drafts` None: 3 where the model has an MTP layer, else none. `prefill_chunk` None: 2048 tokens for one lane on
    cards, else 512. `plain_weights`: bytes of the card's memory; None: what is left.
    `served_model_name` None: the source's repository, else the folder's name. `log_requests` of "-" is standard output.
    `places`: field -> where it stands, for those that stand elsewhere than on the command line.
    """

    ranks: Path
    backend: str = "auto"
    max_context: int | None = None
    devices: str | None = None
    kv: str = "int8"
    attention: str = "split"
    head_split: str = "off"
    graphs: str = "on"
    delta: str = "chunked"
    draft_window: int = 0
    plain_weights: int | None = None
    collective: str = "auto"
    lanes: int = 1
    drafts: int | None = None
    draft_head: str = "auto"
    drafts_from: Path | None = None
    prefill_chunk: int | None = None
    prefix_cache: int = 2 << 30
    prefix_interval: int = 8192
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origin: tuple[str, ...] = ()
    log_requests: Path | None = None
    log_content: bool = False
    allow_image_urls: bool = False
    max_waiting: int = 64
    max_wait_seconds: float = 600.0
    drain_seconds: float = 10.0
    watchdog_seconds: float = 180.0
    quiet: bool = False
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def asked_of_cards(self) -> list[str]:
        """Options that only the CUDA engine reads, where they are not the default, as they were written."""
        return [
            f"{self.written(one.name)} {getattr(self, one.name) or 'off'}"
            for one in fields(self)
            if one.name in FOR_CARDS and getattr(self, one.name) != one.default
        ]

    def written(self, name: str) -> str:
        """An option as the one who set it knows it: with the place, unless that is the command line."""
        return self.places.get(name) or f"--{name.replace('_', '-')}"
