"""Recipes: which tensor becomes what, as data (TOML). What no rule names is kept as the source has it."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..checkpoint.encodings import MATRIX_ENCODINGS
from ..checkpoint.errors import InputError
from ..model.config import ModelConfig
from ..model.inventory import TensorSpec, inventory


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of `group` whose role is in `roles` get `encoding`."""

    group: Literal["text", "mtp", "vision"]
    roles: list[str]
    encoding: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`layout` is a layout family (`v100` or `canonical`); `max_shard_bytes` bounds the files of every later stage."""

    name: str
    layout: Literal["v100", "canonical"]
    max_shard_bytes: int
    rules: list[Rule]

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain JSON, for the manifest and the conversion id."""
        return dict(msgspec.to_builtins(self))

    def encodings(self, config: ModelConfig) -> dict[str, str | None]:
        """tensor name -> encoding, None for 'kept'; the first matching rule wins.

        Raises InputError for a rule that matches nothing in a model that has its group.
        """
        chosen: dict[str, str | None] = {}
        matched = [0] * len(self.rules)
        specs = inventory(config)
        groups = {spec.group for spec in specs.values()}
        heads_tied = config.tie_word_embeddings
        for spec in specs.values():
            chosen[spec.name] = None
            for index, rule in enumerate(self.rules):
                if rule.group == spec.group and spec.role in rule.roles:
                    matched[index] += 1
                    if chosen[spec.name] is None:
                        chosen[spec.name] = rule.encoding
                        _require_matrix(spec, rule.encoding, self.name)
        for rule, count in zip(self.rules, matched, strict=True):
            if not count and rule.group in groups and not (heads_tied and rule.roles == ["lm_head"]):
                raise InputError(f"recipe {self.name!r}: the rule for {rule.group} {rule.roles} matches no tensor.")
        return chosen


def _require_matrix(spec: TensorSpec, encoding: str, recipe: str) -> None:
    if len(spec.shape) != 2:
        raise InputError(f"recipe {recipe!r}: {spec.name} is {list(spec.shape)}; {encoding} stores matrices only.")


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or a TOML file. Raises InputError for anything that is no recipe."""
    builtin = {file.name.removesuffix(".toml"): file for file in (resources.files(__package__) / "recipes").iterdir()}
    try:
        if name_or_path in builtin:
            text = builtin[name_or_path].read_text()
        elif name_or_path.endswith(".toml"):
            text = Path(name_or_path).read_text()
        else:
            raise InputError(
                f"no recipe {name_or_path!r}: built in are {', '.join(sorted(builtin))}; or name a .toml file."
            )
        recipe = msgspec.convert(tomllib.loads(text), Recipe)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name_or_path}: {getattr(error, 'strerror', None) or error}.") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"recipe {name_or_path}: {error}.") from None
    for rule in recipe.rules:
        if rule.encoding not in MATRIX_ENCODINGS:
            raise InputError(
                f"recipe {name_or_path}: encoding {rule.encoding!r} is none of {', '.join(MATRIX_ENCODINGS)}."
            )
    if recipe.max_shard_bytes < 1:
        raise InputError(f"recipe {name_or_path}: max_shard_bytes is {recipe.max_shard_bytes}.")
    return recipe
