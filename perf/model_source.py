"""What `ledger` and `predict` are asked about: a directory of any stage, or a known configuration, as one rank's sheet."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.directory import Checkpoint, read_json
from ..checkpoint.encodings.weights import tile_here, weights_of
from ..checkpoint.errors import InputError
from ..checkpoint.layouts import CANONICAL
from ..checkpoint.manifest import DRAFT_HEAD, Manifest, has_manifest, read_manifest
from ..checkpoint.sources import read_form
from ..convert.plan import plan_conversion
from ..convert.recipe import DEFAULT_RECIPE, load_recipe
from ..convert.source import Source
from ..model.config import ModelConfig, without_mtp
from ..model.inventory import head_of, inventory
from ..model.names import family_names
from .moe import is_moe, moe_sheet
from .shapes import NAMED, configuration
from .sheet import Sheet, sheet_of


@dataclass(frozen=True)
class Described:
    """A dense model in a form: what it is called, its configuration, the encoding of each weight, its ranks."""

    label: str
    config: ModelConfig
    encodings: dict[str, str]
    tp: int

    def with_draft_head(self, rows: int) -> "Described":
        """The same with a draft head of `rows` rows in the head's encoding; 0: without one."""
        config = self.config.with_draft_head(rows)
        encodings = self.encodings
        if rows:
            encodings = encodings | {DRAFT_HEAD: encodings[head_of(config)]}
        return replace(self, config=config, encodings=_with_ids(config, encodings))

    def sheet(self) -> Sheet:
        """What one rank holds. Raises as `sheet_of`."""
        return sheet_of(self.label, self.config, self.encodings, self.tp)


def sheet_at(source: str, tp: int | None, recipe: str | None) -> Sheet:
    """One rank of `tp` of the model at `source`: a source, converted or rank directory, a name, or a config.json.

    `tp` None: as many ranks as a rank directory was made for, else one. `recipe`: what a source would be converted by; a
    name or a config.json has `v100` if none is given. Raises InputError for what is none of these, contradicts itself, or
    cannot be split.
    """
    if source not in NAMED and Path(source).is_dir() and not has_manifest(Path(source)):
        checkpoint = Checkpoint.open(Path(source))
        if is_moe(checkpoint.config):
            if recipe is not None:
                raise InputError(f"{source}: recipes are for the dense models: leave --recipe out.")
            return moe_sheet(checkpoint, tp or 1)
    return model_at(source, tp, recipe).sheet()


def model_at(source: str, tp: int | None, recipe: str | None) -> Described:
    """As `sheet_at`, of a dense model."""
    path = Path(source)
    if source in NAMED or (path.suffix == ".json" and not path.is_dir()):
        return _configured(source, tp or 1, recipe or DEFAULT_RECIPE)
    if not path.is_dir():
        raise InputError(f"{source}: neither a directory, a .gguf or config.json, nor one of {', '.join(NAMED)}.")
    if has_manifest(path):
        if recipe is not None:
            raise InputError(f"{source}: already converted: leave --recipe out.")
        return _finished(path, tp)
    checkpoint = Checkpoint.open(path)
    if is_moe(checkpoint.config):
        raise InputError(f"{source}: a mixture of experts, which the runtime does not run.")
    return _plain(checkpoint, tp or 1) if recipe is None else _converted(path, tp or 1, recipe)


def _configured(name: str, tp: int, recipe_name: str) -> Described:
    if name not in NAMED and is_moe(read_json(Path(name))):
        raise InputError(f"{name}: a mixture of experts: give the checkpoint's directory, whose headers are needed.")
    recipe = load_recipe(recipe_name)
    config = ModelConfig.from_dict(configuration(name), name).with_draft_head(0)
    encodings = {weight: encoding or "bf16" for weight, encoding in recipe.encodings(config).items()}
    if recipe.draft_head:
        config = config.with_draft_head(recipe.draft_head)
        encodings[DRAFT_HEAD] = encodings[head_of(config)]
    label = f"{Path(name).name if name not in NAMED else name}, recipe {recipe.name}"
    return Described(label, config, _with_ids(config, encodings), tp)


def _with_ids(config: ModelConfig, encodings: dict[str, str]) -> dict[str, str]:
    """The id map of a draft head has no encoding of a matrix; nothing reads it but a look-up."""
    return dict.fromkeys(inventory(config), "int32") | encodings


def _finished(path: Path, tp: int | None) -> Described:
    manifest = read_manifest(path)
    config = ModelConfig.of_stage(Checkpoint.open(path).config, manifest, str(path / "config.json"))
    if manifest.tp_size is not None and tp not in (None, manifest.tp_size):
        raise InputError(f"{path}: a rank of {manifest.tp_size}; leave --tp {tp} out, or give the converted directory.")
    label = f"{path.name}, recipe {manifest.recipe.get('name')}, conversion {manifest.conversion_id[:12]}"
    return Described(label, config, _recorded(manifest, path), tp or manifest.tp_size or 1)


def _recorded(manifest: Manifest, path: Path) -> dict[str, str]:
    """weight -> encoding. What is quantised but stands in no tiles is multiplied in fp16."""
    found = {}
    for weight, parts in weights_of(manifest).items():
        name = parts.get("words") or parts.get("plain")
        if name is None:
            raise InputError(f"{path}: weight {weight!r} has only {', '.join(parts)}. Make this directory again.")
        record = manifest.tensors[name]
        tiled = record.part == "plain" or record.layout != CANONICAL
        found[weight] = record.encoding if tiled else "fp16"
        if (tile := tile_here(record.encoding, record)) is not None and tiled:
            found[weight] = f"{record.encoding.partition('/')[0]}/{tile[0]}x{tile[1]}"
    return found


def _plain(checkpoint: Checkpoint, tp: int) -> Described:
    """A source as it is: the encodings that its headers and configuration tell."""
    where = str(checkpoint.path)
    config = ModelConfig.from_dict(checkpoint.config, str(checkpoint.path / "config.json"))
    weights = read_form(checkpoint).weights
    names = family_names(weights, where)
    encodings = {kept: weights[found].encoding for kept, found in names.items()}
    if config.mtp_layers and not any(name.startswith("mtp.") for name in encodings):
        config = ModelConfig.from_dict(without_mtp(checkpoint.config))
    for name, spec in inventory(config).items():
        if name in names and weights[names[name]].shape != spec.shape:
            found_shape = list(weights[names[name]].shape)
            raise InputError(f"{where}: {name} is {found_shape}, the configuration says {list(spec.shape)}.")
    return Described(f"{checkpoint.path.name}, as it is", config, encodings, tp)


def _converted(path: Path, tp: int, recipe_name: str) -> Described:
    source, recipe = Source.open(path), load_recipe(recipe_name)
    encodings = {part.spec.name: part.encoding for part in plan_conversion(source, recipe).parts.values()}
    config = source.config.with_draft_head(recipe.draft_head)
    return Described(f"{path.name}, recipe {recipe.name}", config, _with_ids(config, encodings), tp)
