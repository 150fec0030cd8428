"""What a server counts, for Prometheus and for its web page.

Notable here:
- a registry of its own, so that several servers in one process do not mix
- labels are only names that the server itself knows: no client can make their number grow
- what changes by itself (queue, memory, caches) is read when it is asked for, not kept twice
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pippin.session.response import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_WINDOW = 5.0  # seconds over which "now" is measured

# name, what it is, label
Reading = tuple[str, str, str, dict[str, float]]


@dataclass(eq=False)
class Metrics:
    """The counters of one server.

    Args:
        readings: gives the gauges: name, help, name of the label (empty for none), and value by label. One whose name
            ends in "_total" is a counter: it begins anew when its model is loaded again.
        clock: seconds that only go up.
    """

    readings: Callable[[], list[Reading]] = list
    clock: Callable[[], float] = time.monotonic
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        given = self.registry
        self.http = Counter("pippin_http_requests", "HTTP requests answered", ["route", "status"], registry=given)
        self.requests = Counter(
            "pippin_requests", "Turns of a model, by their end", ["model", "outcome"], registry=given
        )
        self.tokens = Counter(
            "pippin_tokens", "Tokens read, of those not computed, and written", ["model", "kind"], registry=given
        )
        self.first_token = Histogram(
            "pippin_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=given,
        )
        self.duration = Histogram(
            "pippin_request_seconds", "From arrival to end", ["model"], buckets=_SECONDS, registry=given
        )
        self.queued = Histogram(
            "pippin_queue_seconds", "From arrival to a slot", ["model"], buckets=_SECONDS, registry=given
        )
        self.rate = Histogram(
            "pippin_tokens_per_second", "Of one answer, from its first token", ["model"], buckets=_RATES, registry=given
        )
        self.registry.register(self)
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_sum = 0
        self._mean: float | None = None  # seconds in a slot, smoothed

    def collect(self) -> Iterator[Metric]:
        """The readings, as prometheus_client asks for them."""
        for name, text, label, values in self.readings():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            yield family

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first reading."""
        return []

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_usage(self, model: str, usage: Usage) -> None:
        """Count the tokens of a turn."""
        kinds = {"input": usage.input_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}
        for kind, count in kinds.items():
            self.tokens.labels(model, kind).inc(count)

    def written(self, tokens: int) -> None:
        """Note tokens that were just written, for `tokens_per_second`."""
        self._recent.append((self.clock(), tokens))
        self._recent_sum += tokens
        self._drop_old()

    @property
    def tokens_per_second(self) -> float:
        """Tokens written a second by all requests together, over the last five seconds."""
        self._drop_old()
        return self._recent_sum / _WINDOW

    def in_slot(self, seconds: float) -> None:
        """Note how long a request kept its slot."""
        self._mean = seconds if self._mean is None else 0.9 * self._mean + 0.1 * seconds

    def wait_estimate(self, waiting: int, slots: int) -> float:
        """Seconds after which a request that is refused now may try again, from 1 to 120."""
        return min(120.0, max(1.0, (self._mean or 1.0) * (waiting + 1) / slots))

    def _drop_old(self) -> None:
        oldest = self.clock() - _WINDOW
        while self._recent and self._recent[0][0] < oldest:
            self._recent_sum -= self._recent.popleft()[1]
