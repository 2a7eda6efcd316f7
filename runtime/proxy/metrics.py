"""`/metrics` in the text form that Prometheus reads."""

from __future__ import annotations

from .hub import Hub

_COUNTERS = {
    "requests": "requests taken",
    "finished": "answers that ended by themselves or by a stop string",
    "cancelled": "answers whose client left",
    "failed": "answers broken off by a fault",
    "rejected": "requests refused because the queue was full",
    "prompt_tokens": "tokens of prompts",
    "completion_tokens": "tokens of answers",
    "proposed": "drafted tokens judged",
    "accepted": "drafted tokens accepted",
    "restarts": "restarts of the ranks",
}


def metrics_text(hub: Hub, ready: bool) -> str:
    """All counters and gauges, one family each."""
    lines = []
    for name, text in _COUNTERS.items():
        lines += _family(f"duovolt_{name}_total", "counter", text, getattr(hub.counters, name))
    lines += _family("duovolt_running", "gauge", "answers in the making", hub.running)
    lines += _family("duovolt_waiting", "gauge", "requests that wait for a lane", hub.waiting)
    lines += _family("duovolt_ready", "gauge", "1 while the ranks serve", int(ready))
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, value: int) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
