"""Spans of operations and phases, in memory and over OTLP; metrics."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import dcp_telemetry
from dcp_base import CheckpointEvent
from dcp_telemetry.exporters import exporters

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dcp_telemetry.opentelemetry_exporter import OpenTelemetryExporter


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    made = TracerProvider()
    yield made
    made.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    collector = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(collector))
    dcp_telemetry.enable_opentelemetry(tracer_provider=provider)
    return collector


def emit(events: list[CheckpointEvent]) -> None:
    for event in events:
        exporters.dcp_on_event(event)


def test_a_save_is_a_span_with_its_phases_in_it(events: Any, spans: InMemorySpanExporter) -> None:
    emit(events(rank=2))
    plan, write, total = spans.get_finished_spans()
    assert [span.name for span in (plan, write, total)] == ["dcp.save.plan", "dcp.save.write", "dcp.save"]
    assert total.parent is None
    assert total.status.status_code is StatusCode.UNSET
    for span in (plan, write):
        assert span.parent is not None
        assert span.parent.span_id == total.context.span_id
    assert (plan.start_time, plan.end_time) == (1000_000_000_000, 1000_500_000_000)
    assert (total.start_time, total.end_time) == (1000_000_000_000, 1002_000_000_000)
    assert dict(write.attributes or {}) == {
        "dcp.operation": "save",
        "dcp.phase": "write",
        "dcp.rank": 2,
        "dcp.world_size": 4,
        "dcp.checkpoint.id": "step-7",
        "dcp.bytes": 640,
        "dcp.own_seconds": 0.25,
        "dcp.slowest_rank": 3,
        "dcp.slowest_seconds": 0.5,
    }


def test_a_save_is_inside_of_the_current_span(
    events: Any, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    with provider.get_tracer("trainer").start_as_current_span("training step") as step:
        emit(events())
    total = spans.get_finished_spans()[2]
    assert total.parent is not None
    assert total.parent.span_id == step.get_span_context().span_id
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_failure_has_status_and_type(events: Any, spans: InMemorySpanExporter) -> None:
    emit(events(error="OSError: no space left"))
    plan, write, total = spans.get_finished_spans()
    assert plan.status.status_code is StatusCode.UNSET
    for span in (write, total):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "OSError: no space left"
        assert (span.attributes or {})["error.type"] == "OSError"


@pytest.mark.parametrize("seed", range(5))
def test_saves_that_overlap_keep_their_phases(events: Any, spans: InMemorySpanExporter, seed: int) -> None:
    """Events of several saves in any mixture, each save's own in order; two are of one id."""
    waiting = [events(f"step-{number}", rank=rank) for number, rank in itertools.product(range(3), range(2))]
    chance = random.Random(seed)
    while waiting:
        chosen = chance.choice(waiting)
        exporters.dcp_on_event(chosen.pop(0))
        waiting = [each for each in waiting if each]
    check_trees(spans, 6)


def check_trees(spans: InMemorySpanExporter, saves: int) -> None:
    found = spans.get_finished_spans()
    totals = {span.context.span_id: span for span in found if span.name == "dcp.save"}
    assert len(totals) == saves
    assert len(found) == 3 * saves
    for span in found:
        if span.name != "dcp.save":
            assert span.parent is not None
            total = totals[span.parent.span_id]
            for key in ("dcp.checkpoint.id", "dcp.rank"):
                assert (span.attributes or {})[key] == (total.attributes or {})[key]


def test_saves_in_threads_keep_their_phases(events: Any, spans: InMemorySpanExporter) -> None:
    threads = [threading.Thread(target=emit, args=[events(f"step-{number}")]) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_trees(spans, 40)


def test_ends_without_a_start_are_whole_spans(spans: InMemorySpanExporter) -> None:
    """What began before it was enabled, what others emit without an id, a save whose process could not start."""
    emit([CheckpointEvent("manage", "remove", "finished", 0, "step-1")])
    emit([CheckpointEvent("save", "total", "started", 0), CheckpointEvent("save", "total", "failed", 0, seconds=2.0)])
    removed, failed = spans.get_finished_spans()
    assert removed.name == "dcp.manage.remove"
    assert failed.end_time is not None
    assert failed.start_time is not None
    assert failed.end_time - failed.start_time == pytest.approx(2e9, rel=0.01)
    assert (failed.attributes or {})["error.type"] == "_OTHER"


def test_nothing_is_kept_of_what_has_ended(events: Any) -> None:
    exporter = OpenTelemetryExporter(None, None)
    for event in [*events(), *events("step-8", error="OSError: full")]:
        exporter.observe(event)
    assert exporter._running == {}


def test_what_runs_when_it_is_disabled_is_ended(events: Any, spans: InMemorySpanExporter) -> None:
    emit(events()[:4])
    dcp_telemetry.disable()
    assert [span.name for span in spans.get_finished_spans()] == ["dcp.save.plan", "dcp.save.write", "dcp.save"]


def test_bytes_that_wait_for_a_tier_are_a_gauge_and_no_span(spans: InMemorySpanExporter, provider: Any) -> None:
    reader = InMemoryMetricReader()
    exporter = OpenTelemetryExporter(provider, MeterProvider([reader]))
    for size in (900, 300):
        exporter.observe(CheckpointEvent("promote", "waiting", "finished", 0, "s3://far/run", bytes=size))
    data = reader.get_metrics_data()
    assert data is not None
    points = {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert points == {"dcp.tier.waiting": [({"dcp.tier": "s3://far/run"}, 300)]}
    assert spans.get_finished_spans() == ()


def test_metrics_hold_durations_bytes_and_failures(events: Any) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    dcp_telemetry.enable_opentelemetry(meter_provider=meters)
    emit([*events(), *events("step-8"), *events("step-9", error="OSError: full")])
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        (metric.name, metric.unit): metric.data.data_points
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found.keys() == {("dcp.phase.duration", "s"), ("dcp.io", "By"), ("dcp.failures", "{failure}")}
    (written,) = found["dcp.io", "By"]
    assert (written.value, dict(written.attributes)) == (1280, {"dcp.operation": "save", "dcp.rank": 0})
    failed = {point.attributes["dcp.phase"]: point.value for point in found["dcp.failures", "{failure}"]}
    assert failed == {"write": 1, "total": 1}
    counts = {
        (point.attributes["dcp.phase"], point.attributes.get("error.type")): (point.count, point.sum)
        for point in found["dcp.phase.duration", "s"]
    }
    assert counts == {
        ("plan", None): (3, 1.5),
        ("write", None): (2, 3.0),
        ("total", None): (2, 4.0),
        ("write", "OSError"): (1, 1.5),
        ("total", "OSError"): (1, 2.0),
    }
    assert found["dcp.phase.duration", "s"][0].explicit_bounds[:2] == (0.01, 0.03)
    meters.shutdown()


class Collector(ThreadingHTTPServer):
    """An OTLP collector: keeps the requests that come to `/v1/traces`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receive)
        self.bodies: list[tuple[str, bytes]] = []


class Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_spans_arrive_over_otlp(events: Any, provider: TracerProvider) -> None:
    otlp = pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="needs its OTLP exporter"
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with Collector() as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            provider.add_span_processor(BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint, compression=None)))
            dcp_telemetry.enable_opentelemetry(tracer_provider=provider)
            emit(events())
            assert provider.force_flush()
        finally:
            collector.shutdown()
            serving.join()
    ((path, body),) = collector.bodies
    sent = ExportTraceServiceRequest.FromString(body)
    names = [span.name for found in sent.resource_spans for scope in found.scope_spans for span in scope.spans]
    assert path == "/v1/traces"
    assert names == ["dcp.save.plan", "dcp.save.write", "dcp.save"]
