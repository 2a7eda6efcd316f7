"""Everything decided and proved before a process is started: which ranks, which backend, which limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.errors import InputError
from ..rank.backends import Backend, choose_backend
from ..rank.identity import RankIdentity, check_ranks, find_ranks, read_config
from .options import ServeOptions
from .template import ChatTemplate
from .tokenizer import TextTokenizer

DEFAULT_CONTEXT = 32768
_EXCHANGE_SECONDS = 20.0


@dataclass(frozen=True)
class ServePlan:
    """`identity` is that of rank 0; all ranks agree with it but for the number."""

    options: ServeOptions
    backend: Backend
    directories: list[Path]
    identity: RankIdentity
    max_context: int
    drafts: int
    model_id: str
    tokenizer: TextTokenizer
    template: ChatTemplate
    api_key: str | None

    @property
    def size(self) -> int:
        return len(self.directories)

    @property
    def exchange_seconds(self) -> float:
        """How long a rank waits for its twin: well within the watchdog's patience."""
        return min(_EXCHANGE_SECONDS, self.options.watchdog_seconds / 2)

    @property
    def stale_seconds(self) -> float:
        """Age of the last step from which the server does not call itself ready."""
        return min(15.0, self.options.watchdog_seconds / 2)


def make_plan(options: ServeOptions) -> ServePlan:
    """Raises InputError or EnvironmentFault with one message if the server could not work."""
    backend = choose_backend(options.backend)
    scripted = backend.script is not None
    directories = find_ranks(options.ranks, scripted)
    identity = check_ranks(directories, scripted)[0]
    config = read_config(directories[0])
    text = config.get("text_config", config)
    limit = int(text.get("max_position_embeddings", DEFAULT_CONTEXT))
    if options.max_context is not None and options.max_context > limit:
        raise InputError(f"--max-context {options.max_context}: the model's limit is {limit}.")
    drafts = options.drafts
    if not scripted and options.drafts_from is None and not text.get("mtp_num_hidden_layers", 0):
        drafts = 0
    if options.drafts_from is not None:
        _check_drafts(options.drafts_from)
    tokenizer = TextTokenizer(directories[0])
    return ServePlan(
        options,
        backend,
        directories,
        identity,
        options.max_context or min(limit, DEFAULT_CONTEXT),
        drafts,
        identity.source or options.ranks.absolute().name,
        tokenizer,
        ChatTemplate(directories[0], tokenizer),
        _read_key(options.api_key_file),
    )


def _check_drafts(path: Path) -> None:
    try:
        rounds = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"--drafts-from {path}: {error}; expected a JSON list of lists of ids.") from error
    if not isinstance(rounds, list) or not all(
        isinstance(drafts, list) and all(isinstance(token, int) for token in drafts) for drafts in rounds
    ):
        raise InputError(f"--drafts-from {path}: expected a JSON list of lists of ids.")


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {path}: {error}.") from error
    if not key:
        raise InputError(f"--api-key-file {path} is empty; write the key into it.")
    return key
