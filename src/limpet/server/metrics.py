"""Counters of the server, as Prometheus reads them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from time import monotonic as now
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ABOUT = {  # name: (type, help)
    "limpet_requests_total": ("counter", "Requests answered, by path and status."),
    "limpet_request_seconds": ("summary", "Seconds from the head of a request to the end of its answer, by path."),
    "limpet_prompt_tokens_total": ("counter", "Tokens of prompts."),
    "limpet_completion_tokens_total": ("counter", "Tokens of completions."),
    "limpet_batch_requests": ("summary", "Requests in a batch."),
    "limpet_batch_seconds": ("summary", "Seconds that a batch ran."),
    "limpet_network_calls_total": ("counter", "Network calls of batches."),
    "limpet_requests_waiting": ("gauge", "Requests that wait or run."),
    "limpet_ready": ("gauge", "1 if a request would be accepted now."),
}


class Metrics:
    """Sums by name and tags. Any thread may add."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **tags: object) -> None:
        """Add to a counter, or observe a value of a summary."""
        about = ",".join(f'{tag}="{value}"' for tag, value in tags.items())
        shown = f"{{{about}}}" if about else ""
        with self._lock:
            if ABOUT[name][0] == "summary":
                self._sums[name, f"_count{shown}"] += 1
                self._sums[name, f"_sum{shown}"] += amount  # type: ignore[assignment]
            else:
                self._sums[name, shown] += amount  # type: ignore[assignment]

    def __getitem__(self, series: str) -> float:
        """The value of a series, such as limpet_batch_requests_count."""
        with self._lock:
            return next((value for name, value in self._sums.items() if "".join(name) == series), 0)

    def text(self, gauges: Mapping[str, float]) -> str:
        """All series in Prometheus' text format, with the present values of gauges."""
        with self._lock:
            found = {**self._sums, **{(name, ""): value for name, value in gauges.items()}}
        lines = []
        for name, (kind, about) in ABOUT.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{rest} {value:.10g}" for (one, rest), value in sorted(found.items()) if one == name]
        return "\n".join([*lines, ""])


class Counted:
    """ASGI middleware that counts answers. A path that is not served is counted as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, began = scope.get("path"), now()
        path = path if path in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.add("limpet_requests_total", path=path, status=message["status"])
            elif not message.get("more_body"):
                self.metrics.add("limpet_request_seconds", now() - began, path=path)
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)
