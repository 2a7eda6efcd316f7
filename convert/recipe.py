"""Recipes: which tensor becomes what, as data (TOML). What no rule names is kept as the source has it."""

import re
import tomllib
from collections.abc import Collection
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..checkpoint.directory import read_text
from ..checkpoint.encodings import MATRIX_ENCODINGS, PLAIN_ENCODINGS
from ..checkpoint.errors import InputError, one_line
from ..model.config import ModelConfig
from ..model.inventory import TensorSpec, inventory
from .quantisers import QUANTISERS

DEFAULT_RECIPE = "v100"
KEEP = "keep"
LAYER_KINDS = frozenset({"self_attn", "linear_attn"})  # a layer has one of them
_VALUES = {"layout": "v100, canonical", "group": "text, mtp, vision"}
MAX_RECIPE = 4 << 20  # bytes
# nvfp4 loses 7% of a Gaussian matrix, 12% under Student's t with 3 degrees of freedom, 25% with 1.5.
MAX_FLUSHED_SHARE = 0.4


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors to which every given condition applies get `encoding`; at least one of roles and names is given.

    `roles`: names within a layer (`mlp.up_proj`). `names`: patterns of whole names (`*.layers.0.*`; `*`, `?`, `[..]`).
    `encoding`: `nvfp4`, `fp8_e4m3`, a cast (`bf16`, `fp16`, `fp32`), or `keep`.
    """

    encoding: str
    group: Literal["text", "mtp", "vision"] | None = None
    roles: list[str] = []
    names: list[str] = []

    def matches(self, spec: TensorSpec) -> bool:
        """True if the rule speaks of this tensor."""
        return (
            self.group in (None, spec.group)
            and (not self.roles or spec.role in self.roles)
            and (not self.names or any(fnmatchcase(spec.name, pattern) for pattern in self.names))
        )

    def __str__(self) -> str:
        return " ".join(map(str, filter(None, (self.group, self.roles, self.names)))) + f" -> {self.encoding}"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first matching rule decides. `layout` is a layout family (`v100` or `canonical`); `max_shard_bytes` bounds the
    files of every later stage; `quantiser` is a name of convert/quantisers. `draft_head`: rows of a draft head of
    reduced vocabulary, 0 for none; `draft_head_tokens`: a file with token ids, the most frequent first.
    `max_flushed_share`: of a tensor's non-zero values, the largest share that may become zero."""

    name: str
    layout: Literal["v100", "canonical"] = "v100"
    max_shard_bytes: int = 2 << 30
    rules: list[Rule]
    quantiser: str = "default"
    draft_head: int = 0
    draft_head_tokens: str | None = None
    max_flushed_share: float = MAX_FLUSHED_SHARE

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain JSON, for the manifest.

        Without the path of the token list: where it lay decides nothing, and what it chose is stored.
        """
        found = dict(msgspec.to_builtins(self))
        del found["draft_head_tokens"]
        if not self.draft_head:
            del found["draft_head"]
        if self.max_flushed_share == MAX_FLUSHED_SHARE:
            del found["max_flushed_share"]
        return found

    def deciding(self) -> dict[str, Any]:
        """What of it decides output bytes, for the conversion id."""
        return {key: value for key, value in self.resolved().items() if key != "max_flushed_share"}

    def encodings(self, config: ModelConfig) -> dict[str, str | None]:
        """tensor name -> encoding, None for 'kept'; the first matching rule wins.

        Raises InputError for a rule that decides nothing in a model that has its group.
        """
        chosen: dict[str, str | None] = {}
        matched, decided = [0] * len(self.rules), [0] * len(self.rules)
        specs = inventory(config)
        groups = {spec.group for spec in specs.values()}
        heads_tied = config.tie_word_embeddings
        for spec in specs.values():
            chosen[spec.name] = None
            hits = [index for index, rule in enumerate(self.rules) if rule.matches(spec)]
            for index in hits:
                matched[index] += 1
            if hits:
                decided[hits[0]] += 1
                encoding = self.rules[hits[0]].encoding
                ours = QUANTISERS[self.quantiser].encoding if encoding == "nvfp4" else encoding
                chosen[spec.name] = None if encoding == KEEP else ours
                _require_matrix(spec, encoding, self.name)
        for rule, seen, used in zip(self.rules, matched, decided, strict=True):
            if (rule.group is not None and rule.group not in groups) or (heads_tied and rule.roles == ["lm_head"]):
                continue  # a part that this model does not have
            if not seen and _speaks_of_absent_layers(rule, specs.values()):
                continue
            if not seen:
                raise InputError(f"recipe {self.name!r}: the rule {rule} matches no tensor.")
            if not used:
                raise InputError(
                    f"recipe {self.name!r}: earlier rules take every tensor of the rule {rule}. Move it up."
                )
        return chosen


def _speaks_of_absent_layers(rule: Rule, specs: Collection[TensorSpec]) -> bool:
    """True if every role is of a kind of layer that the rule's part of the model has none of, as in a shortened model."""
    present = {spec.role.partition(".")[0] for spec in specs if rule.group in (None, spec.group)}
    kinds = {role.partition(".")[0] for role in rule.roles}
    return bool(kinds) and not rule.names and kinds <= LAYER_KINDS - present


def _require_matrix(spec: TensorSpec, encoding: str, recipe: str) -> None:
    if encoding in MATRIX_ENCODINGS and len(spec.shape) != 2:
        raise InputError(f"recipe {recipe!r}: {spec.name} is {list(spec.shape)}; {encoding} stores matrices only.")


def recorded_recipe(resolved: Any, where: str) -> Recipe:
    """The recipe that a manifest or a journal records. Raises InputError for what is none."""
    try:
        recipe = msgspec.convert(resolved, Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{where}: holds no recipe of this duovolt ({one_line(error)}); name one with --recipe."
        ) from None
    _require_sense(recipe, where)
    return recipe


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or a TOML file. Raises InputError for anything that is no recipe."""
    builtin = {file.name.removesuffix(".toml"): file for file in (resources.files(__package__) / "recipes").iterdir()}
    try:
        if name_or_path in builtin:
            text = builtin[name_or_path].read_text()
        elif name_or_path.endswith(".toml"):
            text = read_text(Path(name_or_path), MAX_RECIPE, "a recipe")
        else:
            raise InputError(
                f"no recipe {name_or_path!r}: built in are {', '.join(sorted(builtin))}; or name a .toml file."
            )
        recipe = msgspec.convert(tomllib.loads(text), Recipe)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:  # a number of thousands of digits, too
        raise InputError(f"recipe {name_or_path}: {one_line(error)}{_choices(error)}.") from None
    _require_sense(recipe, name_or_path)
    if recipe.draft_head_tokens is not None:  # as the recipe's author sees it: beside the recipe
        beside = Path(name_or_path).parent / recipe.draft_head_tokens
        recipe = msgspec.structs.replace(recipe, draft_head_tokens=str(beside))
    return recipe


def _choices(error: Exception) -> str:
    """The values of a key that was given another one."""
    match = re.fullmatch(r"Invalid enum value .* - at `\$.*\.(layout|group)`", str(error), re.DOTALL)
    return "" if match is None else f", which is one of {_VALUES[match[1]]}"


def _require_sense(recipe: Recipe, where: str) -> None:
    known = [*MATRIX_ENCODINGS, *PLAIN_ENCODINGS, KEEP]
    for rule in recipe.rules:
        if rule.encoding not in known:
            raise InputError(f"recipe {where}: encoding {rule.encoding!r} is none of {', '.join(known)}.")
        if not (rule.roles or rule.names):
            raise InputError(f"recipe {where}: a rule ({rule.encoding}) has neither roles nor names.")
    if recipe.quantiser not in QUANTISERS:
        raise InputError(f"recipe {where}: quantiser {recipe.quantiser!r} is none of {', '.join(QUANTISERS)}.")
    if recipe.draft_head < 0 or (recipe.draft_head_tokens is not None and not recipe.draft_head):
        raise InputError(f"recipe {where}: draft_head is {recipe.draft_head}; give the number of rows to keep.")
    if not 0 <= recipe.max_flushed_share <= 1:
        raise InputError(f"recipe {where}: max_flushed_share is {recipe.max_flushed_share}, expected 0 to 1.")
    if recipe.max_shard_bytes < 1:
        raise InputError(f"recipe {where}: max_shard_bytes is {recipe.max_shard_bytes}.")
