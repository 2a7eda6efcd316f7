"""The choices that a benchmark's figures hang on, as its tables name them."""

from collections.abc import Mapping

SWITCHES = (
    "kv",
    "attention",
    "head_split",
    "draft_head",
    "draft_window",
    "collective",
    "graphs",
    "delta",
    "prompts",
    "plain_weights",
)


def named_choices(facts: Mapping[str, str]) -> list[str]:
    """Every switch of an engine, from what it said of itself: `head split on`, and so on; what it did not say is left out."""
    return [f"{name.replace('_', ' ')} {facts[name]}" for name in SWITCHES if name in facts]
