"""How each library names and stores its quantised tensors, and what is in a given source.

A weight's form is decided from names, dtypes and shapes together with the configuration; where the two disagree the
source is refused, since either reading may be the wrong one.
"""

from dataclasses import dataclass, field
from typing import Any

from ..bands import Dialect
from ..container import TensorEntry
from ..directory import Checkpoint, read_json
from ..encodings import PLAIN_OF_DTYPE
from ..errors import InputError
from . import compressed_tensors, finegrained, modelopt
from .base import Declaration, Rule, Scheme, SourceWeight, listed
from .stored import ACTIVATION_SCALES, SCALES, WORDS, Module, describe, modules_of, read_module

HF_QUANT_CONFIG = "hf_quant_config.json"
QUANTIZATION_CONFIG = "quantization_config"
# Parts of a model that exporters are known to leave plain, or to leave out, whatever their rules say.
OPTIONAL_PARTS = ("lm_head", "mtp", "visual", "vision", "embed")


@dataclass(frozen=True)
class SourceForm:
    """What a source holds.

    weights     logical name as the source spells it -> how it is stored; plain tensors included
    dropped     tensors that nothing needs (scales of activations and of the KV cache) -> why
    notices     what was odd and is handled
    config      config.json's quantization_config, word for word
    hf_config   hf_quant_config.json, word for word
    """

    producer: str
    weights: dict[str, SourceWeight]
    dropped: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    hf_config: dict[str, Any] | None = None


def dialect_of(producer: str, dtype: str) -> Dialect:
    """How a producer's own library decodes its weights to `dtype`: F32 or BF16."""
    theirs = producer == "modelopt"
    return Dialect(rounded_scales=theirs and dtype == "BF16", unsigned_zero=theirs)


def producer_of(config: dict[str, Any] | None, hf_config: dict[str, Any] | None) -> str:
    """The library whose convention a configuration follows; `plain` if there is none."""
    if config is None:
        stated = (hf_config or {}).get("quantization")
        return "plain" if stated is None or stated == {} else "modelopt"
    method = config.get("quant_method")
    if method is None and ("quant_algo" in config or hf_config is not None):
        return "modelopt"
    return str(method)


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without what it says of quantisation, at the top and in text_config."""
    plain = {key: value for key, value in config.items() if key != QUANTIZATION_CONFIG}
    text = plain.get("text_config")
    if isinstance(text, dict) and QUANTIZATION_CONFIG in text:
        plain["text_config"] = {key: value for key, value in text.items() if key != QUANTIZATION_CONFIG}
    return plain


def _quantization_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    where = checkpoint.path / "config.json"
    text = checkpoint.config.get("text_config")
    inner = text.get(QUANTIZATION_CONFIG) if isinstance(text, dict) else None
    outer = checkpoint.config.get(QUANTIZATION_CONFIG)
    if inner is not None and outer is not None and inner != outer:
        raise InputError(f"{where}: quantization_config of the top level and of text_config differ. Which one holds?")
    found = inner if outer is None else outer
    if found is not None and not isinstance(found, dict):
        raise InputError(f"{where}: quantization_config is {str(found)[:80]!r}, expected a JSON object.")
    return found


def declaration_of(checkpoint: Checkpoint) -> tuple[Declaration | None, dict[str, Any] | None, dict[str, Any] | None]:
    """(rules, quantization_config, hf_quant_config) of a source; no rules for one that declares no quantisation.

    Raises InputError for an unknown method and for contradictions within the configuration.
    """
    config = _quantization_config(checkpoint)
    hf_path = checkpoint.path / HF_QUANT_CONFIG
    hf_config = read_json(hf_path) if hf_path.exists() else None
    if hf_config is not None and not isinstance(hf_config, dict):
        raise InputError(f"{hf_path}: not a JSON object.")
    where, producer = str(checkpoint.path / "config.json"), producer_of(config, hf_config)
    if producer == "plain":
        return None, config, hf_config
    if producer == "modelopt":
        if config is None:
            where = str(hf_path)
        return modelopt.declare(config, hf_config, where), config, hf_config
    assert config is not None  # only ModelOpt has a file of its own
    if hf_config is not None:
        raise InputError(f"{where}: quant_method {producer!r} beside ModelOpt's {HF_QUANT_CONFIG}. Which one holds?")
    if producer == "compressed-tensors":
        return compressed_tensors.declare(config, where), config, hf_config
    if producer == "fp8":
        return finegrained.declare(config, where), config, hf_config
    raise InputError(
        f"{where}: quantization_config: quant_method {producer!r} is not one that this duovolt reads (compressed-tensors, "
        "modelopt, fp8). Take the model's plain release."
    )


class _Reader:
    """Compares what a configuration declares with what is stored, module by module."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.weights: dict[str, SourceWeight] = {}
        self.dropped: dict[str, str] = {}
        self.problems: list[str] = []
        self.left_plain: list[str] = []

    def module(self, module: Module) -> None:
        found = self.declaration.of(module.name)
        if module.quantised:
            self.declared_plain(module) if not found else self.quantised(module, [scheme for _, scheme in found])
        elif found and module.words is not None and len(module.words.shape) == 2:
            self.declared_but_plain(module.name, module.words, found[0][0])
        taken = {*SCALES, *WORDS} if module.quantised else set()
        for last, entry in module.tensors.items():
            if last in ACTIVATION_SCALES and len(entry.shape) <= 1 and entry.nbytes <= 4:
                self.dropped[entry.name] = ACTIVATION_SCALES[last]
            elif last not in taken:
                self.weights[entry.name] = plain_weight(entry)

    def declared_plain(self, module: Module) -> None:
        rule = self.declaration.ignoring(module.name)
        why = f"ignored by {rule.text!r}" if rule is not None else "named by no rule"
        self.problems.append(f"{module.name!r} is stored quantised, but declared plain ({why})")

    def quantised(self, module: Module, schemes: list[Scheme]) -> None:
        problems = []
        for scheme in schemes:
            try:
                weight = read_module(module, scheme)
                self.weights[weight.name] = weight
                return
            except InputError as error:
                problems.append(str(error))
        self.problems.append(problems[0])

    def declared_but_plain(self, name: str, words: TensorEntry, rule: Rule) -> None:
        if rule.by_class and any(part in name for part in OPTIONAL_PARTS):
            if "embed" not in name:
                self.left_plain.append(name)
            return
        self.problems.append(f"{describe(words)} is stored plain, but declared quantised (by {rule.text!r})")

    def unmatched(self, modules: dict[str, Module]) -> None:
        """Rules that match no module: either the names changed, or the rule protects nothing."""
        rules = [*self.declaration.ignored, *(rule for rule, _ in self.declaration.targets)]
        for rule in rules:
            optional = any(part in rule.text for part in OPTIONAL_PARTS)
            if not rule.by_class and not optional and not any(rule.matches(name) for name in modules):
                self.problems.append(f"the rule {rule.text!r} matches nothing")
        if self.declaration.targets and not any("words" in weight.parts for weight in self.weights.values()):
            self.problems.append("no tensor is stored quantised")


def plain_weight(entry: TensorEntry) -> SourceWeight:
    """A tensor kept as it is. Its encoding is its dtype where that is no floating-point type we store weights in."""
    encoding = PLAIN_OF_DTYPE.get(entry.dtype, entry.dtype)
    return SourceWeight(entry.name, entry.shape, encoding, {"plain": entry})


def read_form(checkpoint: Checkpoint) -> SourceForm:
    """What a source holds, from headers and configuration alone.

    Raises InputError that lists every contradiction between what is declared and what is stored.
    """
    declaration, config, hf_config = declaration_of(checkpoint)
    modules = modules_of(checkpoint.tensors)
    if declaration is None:
        for module in modules.values():
            if module.quantised:
                entry = next(iter(module.tensors.values())) if module.words is None else module.words
                raise InputError(
                    f"{entry.path}: tensor {describe(entry)} is quantised or a scale, but the configuration declares no "
                    "quantisation (no quantization_config, no hf_quant_config.json). Fetch the whole repository again."
                )
        weights = {name: plain_weight(entry) for name, entry in checkpoint.tensors.items()}
        return SourceForm("plain", weights, config=config, hf_config=hf_config)
    reader = _Reader(declaration)
    for module in modules.values():
        reader.module(module)
    reader.unmatched(modules)
    if reader.problems:
        raise InputError(
            f"{declaration.where}: the quantisation that is declared ({declaration.producer}) is not what is stored: "
            f"{listed(reader.problems)}."
        )
    notices = []
    if reader.left_plain:
        notices.append(f"declared quantised, stored plain, kept plain: {listed(reader.left_plain)}")
    return SourceForm(declaration.producer, reader.weights, reader.dropped, notices, config, hf_config)
