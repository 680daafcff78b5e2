"""OpenTelemetry exporter of spans and metrics, on OpenTelemetry's API package; the application configures the SDK."""

from __future__ import annotations

import time

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from dcp_base import CheckpointEvent
from dcp_telemetry.event_fields import BUCKETS_SECONDS, TOTAL, error_type, is_waiting

_SCOPE = "dcp_telemetry"


class OpenTelemetryExporter:
    """See `enable_opentelemetry`. Thread-safe."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None, meter_provider: metrics.MeterProvider | None
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._durations = meter.create_histogram(
            "dcp.phase.duration",
            unit="s",
            description="Duration of phases of saves and loads, the wait for other ranks included",
            explicit_bucket_boundaries_advisory=BUCKETS_SECONDS,
        )
        self._bytes = meter.create_counter("dcp.io", unit="By", description="Bytes written by saves, read by loads")
        self._failures = meter.create_counter(
            "dcp.failures", unit="{failure}", description="Phases of saves and loads that failed"
        )
        self._waiting = meter.create_gauge(
            "dcp.tier.waiting", unit="By", description="Bytes that a tier must still get from nearer ones"
        )
        # Running phases per operation, outermost first. All events of an operation come from one thread.
        self._running: dict[str, dict[str, Span]] = {}

    def observe(self, event: CheckpointEvent) -> None:
        """See `Exporter.observe`."""
        if is_waiting(event):
            self._waiting.set(event.bytes or 0, {"dcp.tier": event.checkpoint_id or ""})
            return
        if event.state == "started":
            if event.operation_id is not None:  # without an id, the phase's end cannot be matched
                self._running.setdefault(event.operation_id, {})[event.phase] = self._start(event, _time_ns(event))
            return
        span = self._running.get(event.operation_id or "", {}).pop(event.phase, None)
        if event.phase == TOTAL:
            self._running.pop(event.operation_id or "", None)
        if span is None:  # started before the exporter
            span = self._start(event, _time_ns(event) - round((event.seconds or 0) * 1e9))
        self._end(span, event)
        self._measure(event)

    def close(self) -> None:
        """See `Exporter.close`."""
        for operation in [*self._running]:
            for span in reversed([*self._running.pop(operation, {}).values()]):
                span.end()

    def _start(self, event: CheckpointEvent, time_ns: int) -> Span:
        around = [*self._running.get(event.operation_id or "", {}).values()]
        name = f"dcp.{event.operation}" if event.phase == TOTAL else f"dcp.{event.operation}.{event.phase}"
        attributes: dict[str, str | int | None] = {
            "dcp.operation": event.operation,
            "dcp.phase": event.phase,
            "dcp.rank": event.rank,
            "dcp.world_size": event.world_size,
            "dcp.checkpoint.id": event.checkpoint_id,
        }
        return self._tracer.start_span(
            name,
            context=trace.set_span_in_context(around[-1]) if around else None,
            attributes={key: value for key, value in attributes.items() if value is not None},
            start_time=time_ns,
        )

    def _end(self, span: Span, event: CheckpointEvent) -> None:
        measured: dict[str, float | None] = {
            "dcp.bytes": event.bytes,
            "dcp.own_seconds": event.own_seconds,
            "dcp.slowest_rank": event.slowest_rank,
            "dcp.slowest_seconds": event.slowest_seconds,
        }
        span.set_attributes({key: value for key, value in measured.items() if value is not None})
        if event.state == "failed":
            span.set_attribute("error.type", error_type(event))
            span.set_status(Status(StatusCode.ERROR, event.error))
        span.end(_time_ns(event))

    def _measure(self, event: CheckpointEvent) -> None:
        attributes: dict[str, str | int] = {
            "dcp.operation": event.operation,
            "dcp.phase": event.phase,
            "dcp.rank": event.rank,
        }
        if event.state == "failed":
            attributes["error.type"] = error_type(event)
            self._failures.add(1, attributes)
        if event.seconds is not None:
            self._durations.record(event.seconds, attributes)
        if event.bytes is not None and event.phase == TOTAL:  # the total includes its phases
            self._bytes.add(event.bytes, {"dcp.operation": event.operation, "dcp.rank": event.rank})


def _time_ns(event: CheckpointEvent) -> int:
    return time.time_ns() if event.time is None else round(event.time * 1e9)
