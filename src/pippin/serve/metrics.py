"""Metrics of a server, for Prometheus and for its web page.

Notable here:
- a separate registry, so that several servers in one process do not mix
- labels are only names that the server itself knows: no client can increase their number
- gauges (queue, memory, caches) are read when they are requested, not stored
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
_WINDOW = 5.0  # seconds of the window for tokens per second

# name, description, label
Reading = tuple[str, str, str, dict[str, float]]


@dataclass(eq=False)
class Metrics:
    """The counters of one server.

    Args:
        readings: returns the gauges: name, help, name of the label (empty for none), and value by label. A name that
            ends in "_total" is a counter, which starts again when its model is reloaded.
        clock: a monotonic clock in seconds.
    """

    readings: Callable[[], list[Reading]] = list
    clock: Callable[[], float] = time.monotonic
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        given = self.registry
        self.http = Counter("pippin_http_requests", "HTTP requests answered", ["route", "status"], registry=given)
        self.requests = Counter(
            "pippin_requests", "Requests to a model, by outcome", ["model", "outcome"], registry=given
        )
        self.tokens = Counter(
            "pippin_tokens", "Input, cached input and output tokens", ["model", "kind"], registry=given
        )
        self.first_token = Histogram(
            "pippin_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=given,
        )
        self.duration = Histogram(
            "pippin_request_seconds",
            "From the arrival of a request to its end",
            ["model"],
            buckets=_SECONDS,
            registry=given,
        )
        self.queued = Histogram(
            "pippin_queue_seconds",
            "From the arrival of a request until it has a slot of the batch",
            ["model"],
            buckets=_SECONDS,
            registry=given,
        )
        self.rate = Histogram(
            "pippin_tokens_per_second",
            "Tokens per second of one answer, from its first token",
            ["model"],
            buckets=_RATES,
            registry=given,
        )
        self.registry.register(self)
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_sum = 0
        self._mean: float | None = None  # moving average of the seconds that a request runs

    def collect(self) -> Iterator[Metric]:
        """The gauges, as prometheus_client requests them."""
        for name, text, label, values in self.readings():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            yield family

    def describe(self) -> list[Metric]:
        """Nothing before the first collection."""
        return []

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_usage(self, model: str, usage: Usage) -> None:
        """Count the tokens of a request."""
        kinds = {"input": usage.input_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}
        for kind, count in kinds.items():
            self.tokens.labels(model, kind).inc(count)

    def written(self, tokens: int) -> None:
        """Record tokens that were just generated, for `tokens_per_second`."""
        self._recent.append((self.clock(), tokens))
        self._recent_sum += tokens
        self._drop_old()

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of all requests together, over the last five seconds."""
        self._drop_old()
        return self._recent_sum / _WINDOW

    def in_slot(self, seconds: float) -> None:
        """Record how long a request ran."""
        self._mean = seconds if self._mean is None else 0.9 * self._mean + 0.1 * seconds

    def wait_estimate(self, waiting: int, max_num_seqs: int) -> float:
        """Seconds after which a rejected request may retry, from 1 to 120."""
        return min(120.0, max(1.0, (self._mean or 1.0) * (waiting + 1) / max_num_seqs))

    def _drop_old(self) -> None:
        oldest = self.clock() - _WINDOW
        while self._recent and self._recent[0][0] < oldest:
            self._recent_sum -= self._recent.popleft()[1]
