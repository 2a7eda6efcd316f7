"""`/metrics` in the text form that Prometheus reads, written by its own client library."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from .state import ServerState

_COUNTERS = {
    "requests": "answers asked of the ranks",
    "finished": "answers that ended by themselves or by a stop string",
    "cancelled": "answers whose client left",
    "failed": "answers broken off by a fault",
    "rejected": "requests refused because the queue was full",
    "expired": "answers given up because no lane came free in time",
    "prompt_tokens": "tokens of prompts",
    "completion_tokens": "tokens of answers",
    "proposed": "drafted tokens judged",
    "accepted": "drafted tokens accepted",
    "cached_prompts": "prompts whose beginning was in the prefix cache",
    "cached_tokens": "tokens of prompts that need not be read, because it held them",
    "restarts": "restarts of the ranks",
}
_OUTCOMES = ("finished", "cancelled", "failed", "rejected", "expired")


class ServerCollector:
    """Reads the server's state at each scrape."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """All families."""
        hub, state = self._state.hub, self._state
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"duovolt_{name}", text, getattr(hub.counters, name))
        outcomes = CounterMetricFamily("duovolt_answers", "answers by how they ended", labels=["outcome"])
        for outcome in _OUTCOMES:
            outcomes.add_metric([outcome], getattr(hub.counters, outcome))
        yield outcomes
        reasons = CounterMetricFamily("duovolt_finish_reasons", "answers by finish reason", labels=["reason"])
        for reason, count in sorted(hub.counters.reasons.items()):
            reasons.add_metric([reason], count)
        yield reasons
        gauges: dict[str, tuple[str, float | None]] = {
            "ready": ("1 while the ranks serve", int(state.ready)),
            "draining": ("1 while the server is stopping", int(hub.draining)),
            "running": ("lanes in use: answers in the making", hub.running),
            "lanes": ("lanes there are", state.lanes),
            "waiting": ("requests that wait for a lane", hub.waiting),
            "tokens_per_second": ("all answers together, over five seconds", hub.tokens_per_second()),
            "kv_pages": ("pages of keys and values there are, each rank", state.kv_pages),
            "kv_pages_free": ("pages that no lane and no kept prefix holds", state.free_pages),
            "prefixes": ("prefixes kept for later prompts", state.prefixes),
            "prefixes_evicted": ("prefixes let go since the ranks started", state.prefixes_evicted),
            "context_tokens": ("tokens held in the caches of all lanes", state.context_tokens),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"duovolt_{name}", text, value)
        yield from self._ranks()
        yield InfoMetricFamily("duovolt_server", "what is being served", state.labels())

    def _ranks(self) -> Iterator[Metric]:
        steps = GaugeMetricFamily("duovolt_rank_steps", "turns of the rank's loop since it started", labels=["rank"])
        records = GaugeMetricFamily(
            "duovolt_lockstep_records", "lockstep records the rank has given since it started", labels=["rank"]
        )
        ages = GaugeMetricFamily("duovolt_rank_last_step_seconds", "age of the last sign of life", labels=["rank"])
        overflows = GaugeMetricFamily(
            "duovolt_rank_fp16_overflows",
            "values cut to 65504 since the rank started; answers may suffer",
            labels=["rank"],
        )
        for rank in self._state.ranks():
            overflows.add_metric([str(rank.number)], rank.overflows)
            steps.add_metric([str(rank.number)], rank.steps)
            records.add_metric([str(rank.number)], rank.records)
            ages.add_metric([str(rank.number)], rank.age_seconds)
        yield from (steps, records, ages, overflows)


def metrics_text(state: ServerState) -> str:
    """Totals, gauges and distributions of the server, and the process's own memory and time."""
    registry = state.hub.meters.registry
    if not state.registered:
        state.registered = True
        registry.register(ServerCollector(state))
        ProcessCollector(registry=registry)
    return generate_latest(registry).decode()
