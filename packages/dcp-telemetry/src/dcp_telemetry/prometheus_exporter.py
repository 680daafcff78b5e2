"""Prometheus exporter of counters, histograms and gauges."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from dcp_base import CheckpointEvent
from dcp_telemetry.event_fields import BUCKETS_SECONDS, TOTAL, is_waiting

_STEP = re.compile(r"step\D?(\d+)|(\d+)\D*$")


class PrometheusExporter:
    """Keeps metrics in a Prometheus registry. Thread-safe. Raises ValueError as `enable_prometheus`.

    The label `tier` is a path or URI. No label has a checkpoint id or error text, which would create unlimited series.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._registry = REGISTRY if registry is None else registry
        phase, call = ("operation", "phase", "rank"), ("operation", "rank")
        self._durations = Histogram(
            "dcp_phase_duration_seconds",
            "Duration of finished phases of saves and loads, the wait for other ranks included",
            phase,
            registry=None,
            buckets=BUCKETS_SECONDS,
        )
        self._last = Gauge("dcp_phase_last_duration_seconds", "The same, of the last one alone", phase, registry=None)
        self._last_own = Gauge(
            "dcp_phase_last_own_duration_seconds", "Duration of the rank's own part of it", phase, registry=None
        )
        self._bytes = Counter("dcp_bytes", "Bytes written by saves, read by loads", call, registry=None)
        self._failures = Counter("dcp_failures", "Phases of saves and loads that failed", phase, registry=None)
        self._time = Gauge(
            "dcp_last_success_timestamp_seconds", "Time of the last good save or load", call, registry=None
        )
        self._step = Gauge(
            "dcp_last_success_step", "Step in the id of the last checkpoint saved or loaded", call, registry=None
        )
        self._waiting = Gauge(
            "dcp_tier_waiting_bytes", "Bytes that a tier must still get from nearer ones", ("tier",), registry=None
        )
        self._arrived = Gauge(
            "dcp_tier_last_step", "Step of the last checkpoint that was promoted to a tier", ("tier",), registry=None
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics for a scrape."""
        of_calls = (self._durations, self._last, self._last_own, self._bytes, self._failures, self._time, self._step)
        for metric in (*of_calls, self._waiting, self._arrived):
            yield from metric.collect()

    def observe(self, event: CheckpointEvent) -> None:
        """See `Exporter.observe`."""
        if is_waiting(event):
            self._waiting.labels(event.checkpoint_id).set(event.bytes or 0)
            return
        phase, call = (event.operation, event.phase, event.rank), (event.operation, event.rank)
        failures = self._failures.labels(
            *phase
        )  # create the series at 0; `rate()` misses the first increment of a new series
        if event.phase == TOTAL:
            self._bytes.labels(*call).inc(event.bytes or 0)
        if event.state == "failed":
            failures.inc()
        if event.state != "finished":
            return
        if event.seconds is not None:
            self._durations.labels(*phase).observe(event.seconds)
            self._last.labels(*phase).set(event.seconds)
        if event.own_seconds is not None and event.phase != TOTAL:
            self._last_own.labels(*phase).set(event.own_seconds)
        if event.phase == TOTAL:
            self._succeeded(event)

    def close(self) -> None:
        """See `Exporter.close`."""
        self._registry.unregister(self)

    def _succeeded(self, event: CheckpointEvent) -> None:
        self._time.labels(event.operation, event.rank).set(time.time() if event.time is None else event.time)
        place, _, name = (event.checkpoint_id or "").rstrip("/").rpartition("/")
        if found := _STEP.search(name):
            step = float(found[1] or found[2])
            self._step.labels(event.operation, event.rank).set(step)
            if event.operation == "promote":
                self._arrived.labels(place).set(step)
