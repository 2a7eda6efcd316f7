"""What is measured while requests pass: the distributions and counts that `/metrics` shows beside the hub's totals."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from .opened import OpenRequest

_QUEUE = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_PER_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_LONGEST_STEP = 8  # tokens: one and its drafts


class Meters:
    """Seconds and tokens, each a histogram in a registry of its own, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "duovolt_http_responses", "HTTP answers by path and status", ("path", "status"), registry=self.registry
        )
        self._queue = self._histogram("queue_seconds", "request to its lane", _QUEUE)
        self._first_token = self._histogram("first_token_seconds", "request to first token", _FIRST_TOKEN)
        self._per_token = self._histogram("token_seconds", "seconds a token after the first, by answer", _PER_TOKEN)
        self._whole = self._histogram("answer_seconds", "request to last token", _WHOLE)
        self._prompt = self._histogram("prompt_length_tokens", "tokens of a prompt", _TOKENS)
        self._answer = self._histogram("answer_length_tokens", "tokens of an answer", _TOKENS)
        self._step = self._histogram("step_tokens", "tokens that one round gave a lane", range(1, _LONGEST_STEP + 1))

    def count_response(self, path: str, status: int | None) -> None:
        """`status` None: the client was gone before there was one."""
        self._responses.labels(path, "none" if status is None else str(status)).inc()

    def count_step(self, tokens: int) -> None:
        """One round's tokens of one lane."""
        self._step.observe(tokens)

    def count_answer(self, opened: OpenRequest, now: float) -> None:
        """An answer has ended, whichever way."""
        self._prompt.observe(len(opened.request.prompt))
        self._answer.observe(opened.tokens)
        self._whole.observe(now - opened.started)
        if opened.admitted is not None:
            self._queue.observe(opened.admitted - opened.started)
        if opened.first is not None:
            self._first_token.observe(opened.first - opened.started)
        if (pace := opened.seconds_per_token) is not None:
            self._per_token.observe(pace)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...] | range) -> Histogram:
        return Histogram(f"duovolt_{name}", text, buckets=[float(bound) for bound in bounds], registry=self.registry)
