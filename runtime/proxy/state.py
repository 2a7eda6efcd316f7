"""What the server is doing at this moment, for `/metrics` and for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .cards import CardReader
from .group import RankView
from .hub import Hub
from .plan import ServePlan
from .supervisor import Supervisor


class ServerState:
    """One view over plan, hub and supervisor. `registered`: the hub's meters know this state."""

    def __init__(self, plan: ServePlan, hub: Hub, supervisor: Supervisor) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._cards = CardReader()
        self.hub = hub
        self.registered = False

    @property
    def ready(self) -> bool:
        return self._supervisor.ready and not self.hub.draining

    @property
    def lanes(self) -> int:
        return self._plan.options.lanes

    def ranks(self) -> list[RankView]:
        """One entry a rank, in rank order; none while there are no ranks."""
        return self._supervisor.views()

    @property
    def kv_pages(self) -> int | None:
        """Pages each rank has; None if its backend has none."""
        pages = self._supervisor.facts.get("kv_pages", "")
        return int(pages) if pages.isdecimal() else None

    @property
    def free_pages(self) -> int | None:
        """Pages that no lane and no kept prefix holds; None if the backend has none or has made no step."""
        record = self._record()
        return None if record is None or self.kv_pages is None else record.free_pages

    @property
    def context_tokens(self) -> int | None:
        """Tokens in the caches of all lanes; None before the first step."""
        record = self._record()
        return None if record is None else record.position

    @property
    def prefixes(self) -> int | None:
        """Prefixes kept for later prompts; None before the first step."""
        record = self._record()
        return None if record is None else record.prefixes

    @property
    def prefixes_evicted(self) -> int | None:
        """Prefixes let go since the ranks started; None before the first step."""
        record = self._record()
        return None if record is None else record.evicted

    def labels(self) -> dict[str, str]:
        """The choices that do not change while the server runs."""
        identity = self._plan.identity
        return {
            "model": self._plan.model_id,
            "conversion": identity.conversion_id,
            "recipe": identity.recipe,
            "backend": self._plan.backend.name,
            "ranks": str(self._plan.size),
            "drafts": str(self._plan.drafts),
            "lanes": str(self.lanes),
            "max_context": str(self._plan.max_context),
            **{name: value for name, value in self._supervisor.facts.items() if name != "kv_pages"},
        }

    async def picture(self) -> dict[str, Any]:
        """Everything the page shows, as JSON values."""
        counters = self.hub.counters
        cards, reason = await self._cards.read()
        return {
            "ready": self.ready,
            "draining": self.hub.draining,
            "server": self.labels(),
            "running": self.hub.running,
            "waiting": self.hub.waiting,
            "lanes": [
                {"number": lane.request.request_id, **lane.facts(), "most_tokens": lane.request.max_tokens}
                for lane in self.hub.in_making()
            ],
            "tokens_per_second": round(self.hub.tokens_per_second(), 1),
            "acceptance": round(counters.accepted / counters.proposed, 4) if counters.proposed else None,
            "counters": {name: value for name, value in asdict(counters).items() if name != "reasons"},
            "kv_pages": self.kv_pages,
            "kv_pages_free": self.free_pages,
            "prefixes": self.prefixes,
            "prefixes_evicted": self.prefixes_evicted,
            "context_tokens": self.context_tokens,
            "max_context": self._plan.max_context,
            "images": self._plan.pictures is not None,
            "videos": self._plan.pictures is not None and self._plan.pictures.videos is not None,
            "ranks": [
                {
                    "rank": rank.number,
                    "pid": rank.pid,
                    "busy": rank.busy,
                    "steps": rank.steps,
                    "lockstep_records": rank.records,
                    "last_step_seconds": round(rank.age_seconds, 2),
                    "fp16_overflows": rank.overflows,
                }
                for rank in self.ranks()
            ],
            "cards": cards,
            "cards_missing": reason,
        }

    def _record(self) -> Any:
        return next((rank.record for rank in self.ranks()), None)
