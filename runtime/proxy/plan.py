"""Everything decided and proved before a process is started: which ranks, which backend, which limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from ...checkpoint.directory import read_json
from ...checkpoint.errors import EnvironmentFault, InputError, no_effect, without_effect
from ...checkpoint.manifest import has_manifest, read_manifest
from ...model.config import ModelConfig
from ..parallel.choice import Choice, Wish, choose
from ..rank.backends import Backend, choose_backend
from ..rank.identity import RankIdentity, check_ranks, find_ranks
from ..rank.preflight import Settled, Wishes, card_seen, preflight
from .key import KeyRing, read_keys
from .options import ServeOptions
from .origins import check_origins
from .pictures import PictureReader
from .schema import TokenId
from .template import ChatTemplate
from .tls import check_tls
from .tokenizer import TextTokenizer

DEFAULT_CONTEXT = 32768
DRAFTS = 3
CHUNK, LONE_CHUNK = 512, 2048
_EXCHANGE_SECONDS = 20.0


@dataclass(frozen=True)
class ServePlan:
    """`identity` is that of rank 0; all ranks agree with it but for the number. `pictures` None: text only.

    cards   what was settled for the CUDA backend; None for the others
    way     what was chosen between two cards
    notice  why `auto` did not take the cards of this machine
    unread  what a file or a variable says and this server has no use for, and why; `options` have the defaults in its place
    """

    options: ServeOptions
    backend: Backend
    directories: list[Path]
    identity: RankIdentity
    max_context: int
    drafts: int
    model_id: str
    tokenizer: TextTokenizer
    template: ChatTemplate
    keys: KeyRing
    pictures: PictureReader | None = None
    cards: Settled | None = None
    way: Choice | None = None
    notice: str = ""
    unread: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.directories)

    @property
    def prefill_chunk(self) -> int:
        return chunk_of(self.options, on_cards=self.cards is not None and bool(self.cards.uuids))

    @property
    def exchange_seconds(self) -> float:
        """How long a rank waits for its twin: well within the watchdog's patience."""
        return min(_EXCHANGE_SECONDS, self.options.watchdog_seconds / 2)

    @property
    def stale_seconds(self) -> float:
        """Age of the last step from which the server does not call itself ready."""
        return min(15.0, self.options.watchdog_seconds / 2)


def chunk_of(options: ServeOptions, *, on_cards: bool) -> int:
    """Prompt tokens a step: as asked for; large where nobody waits for the step's end but the prompt itself."""
    if options.prefill_chunk is not None:
        return options.prefill_chunk
    return LONE_CHUNK if on_cards and options.lanes == 1 else CHUNK


def make_plan(options: ServeOptions) -> ServePlan:
    """Raises InputError or EnvironmentFault with one message if the server could not work."""
    check_origins(options.cors_origin)
    check_tls(options.tls_cert, options.tls_key)
    unread: list[str] = []
    backend = choose_backend(options.backend)
    scripted = backend.script is not None
    directories = [path.resolve() for path in find_ranks(options.ranks, scripted)]  # a link may be turned meanwhile
    identity = check_ranks(directories, scripted)[0]
    config = _model_config(directories[0], scripted)
    limit = DEFAULT_CONTEXT if config is None else config.text.max_position_embeddings
    if options.max_context and options.max_context > limit:
        raise InputError(f"--max-context {options.max_context}: the model's limit is {limit}.")
    if options.draft_head == "on" and not scripted and (config is None or not config.text.draft_rows):
        raise InputError(
            f"--draft-head on: {directories[0]} has no draft head. Convert with `draft_head = ROWS` in the recipe, or "
            "leave the option out."
        )
    drafts = DRAFTS if options.drafts is None else options.drafts
    if not scripted and options.drafts_from is None and (config is None or not config.mtp_layers):
        if options.drafts:
            why = f"the model of {options.ranks} has no MTP layer, which is what drafts"
            options = _unread(options, "drafts", why, unread, 0)
        drafts = 0
    tokenizer = TextTokenizer(directories[0])
    if config is not None and tokenizer.size > config.text.vocab_size:
        raise InputError(
            f"{directories[0]}: the tokenizer's largest id is {tokenizer.size - 1}, the model has "
            f"{config.text.vocab_size} rows; the files are of two models."
        )
    if options.drafts_from is not None:
        _check_drafts(options.drafts_from, tokenizer)
    if len(directories) == 1:
        options = _of_one_rank(options, unread)
    template, keys = ChatTemplate(directories[0], tokenizer), KeyRing(read_keys(options.api_key_file))
    pictures = PictureReader.of(directories[0], config, tokenizer, options.allow_image_urls)
    if options.allow_image_urls and pictures is None:
        options = _unread(options, "allow_image_urls", f"the model of {options.ranks} reads no pictures", unread, False)
    backend, cards, notice = _settle(backend, options, directories, drafts)
    return ServePlan(
        options,
        backend,
        directories,
        identity,
        (options.max_context or min(limit, DEFAULT_CONTEXT)) if cards is None else cards.max_context,
        drafts,
        options.served_model_name or identity.source or options.ranks.absolute().name,
        tokenizer,
        template,
        keys,
        pictures,
        cards,
        choose(cast(Wish, options.collective), cards.uuids) if cards is not None and len(cards.uuids) == 2 else None,
        notice,
        tuple(unread),
    )


def _of_one_rank(options: ServeOptions, unread: list[str]) -> ServeOptions:
    """Without what one rank has no use for: it has the whole head, and nobody to exchange with."""
    if options.collective != "auto":
        why = f"{options.ranks} is one rank, which exchanges nothing"
        options = _unread(options, "collective", why, unread, "auto")
    if options.head_split == "on":
        options = _unread(
            options, "head_split", f"{options.ranks} is one rank, which has the whole head", unread, "off"
        )
    return options


def _unread(options: ServeOptions, name: str, why: str, unread: list[str], instead: str | int) -> ServeOptions:
    """With `instead` for an option without effect, and a line in `unread`. Raises InputError if it is the command line's."""
    if name not in options.places:
        raise without_effect(options.written(name), why)
    unread.append(f"{no_effect(options.written(name), why)}.")
    changed: dict[str, Any] = {name: instead}
    return replace(options, **changed)


def _settle(
    backend: Backend, options: ServeOptions, directories: list[Path], drafts: int
) -> tuple[Backend, Settled | None, str]:
    """The backend, what was settled for its cards, and why `auto` did not take them."""
    on_cpu = options.devices == "cpu"
    if backend.name not in ("auto", "cuda") or (backend.name == "auto" and not (card_seen() or options.devices)):
        if options.devices is not None and backend.name != "scripted":
            raise InputError(f"--devices {options.devices}: the {backend.name} backend uses no cards. Leave it out.")
        if backend.name == "auto":
            return Backend("reference"), None, "no NVIDIA card is seen; `duovolt doctor` tells more."
        return backend, None, ""
    wishes = Wishes(
        directories=[str(path) for path in directories],
        devices=None if options.devices is None or on_cpu else [int(word) for word in options.devices.split(",")],
        on_cpu=on_cpu,
        kv=options.kv,
        lanes=options.lanes,
        drafts=drafts,
        prefill_chunk=chunk_of(options, on_cards=not on_cpu),
        max_context=options.max_context or None,
        plain_weights=options.plain_weights,
    )
    found = preflight(wishes)
    if isinstance(found, Settled):
        return Backend("cuda"), found, ""
    if backend.name == "auto" and found.unfit and options.devices is None:
        return Backend("reference"), None, found.message
    raise (EnvironmentFault if found.exit_code == EnvironmentFault.exit_code else InputError)(found.message)


def _model_config(directory: Path, scripted: bool) -> ModelConfig | None:
    """The model's configuration; a scripted server may do without."""
    if scripted and not (directory / "config.json").exists():
        return None
    if scripted or not has_manifest(directory):
        return ModelConfig.read(directory)
    path = directory / "config.json"
    return ModelConfig.of_stage(read_json(path), read_manifest(directory), str(path))


def _check_drafts(path: Path, tokenizer: TextTokenizer) -> None:
    what = "expected a JSON list of lists of token ids"
    try:
        rounds = msgspec.json.decode(path.read_bytes(), type=list[list[TokenId]])
    except OSError as error:
        raise InputError(f"--drafts-from {path}: {error.strerror}; {what}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"--drafts-from {path}: {error}; {what}.") from error
    if (largest := max((token for drafts in rounds for token in drafts), default=0)) >= tokenizer.size:
        raise InputError(f"--drafts-from {path}: id {largest} is not below {tokenizer.size}; {what}.")
