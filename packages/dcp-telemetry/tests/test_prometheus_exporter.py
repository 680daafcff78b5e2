"""Metrics of Prometheus, scraped over HTTP."""

from __future__ import annotations

import threading
import urllib.request
from typing import Any

import pytest

import dcp_telemetry
from dcp_base import CheckpointEvent
from dcp_telemetry.exporters import exporters

pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, start_http_server
from prometheus_client.parser import text_string_to_metric_families

SAVE = {"operation": "save", "rank": "0"}
TOTAL = {**SAVE, "phase": "total"}


def emit(events: list[CheckpointEvent]) -> None:
    for event in events:
        exporters.dcp_on_event(event)


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    dcp_telemetry.enable_prometheus(made)
    return made


def scrape(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample that is served: name and labels → value."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=250) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    families = text_string_to_metric_families(text)
    return {(each.name, frozenset(each.labels.items())): each.value for found in families for each in found.samples}


def test_metrics_are_scraped_over_http(events: Any, registry: CollectorRegistry) -> None:
    emit([*events("step-7"), *events("step-8", at=2000.0), *events("step-9", at=3000.0, error="OSError: full")])
    found = {(name, frozenset(labels)): value for (name, labels), value in scrape(registry).items()}

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset(labels.items())))

    assert value("dcp_bytes_total", **SAVE) == 1280
    assert value("dcp_last_success_timestamp_seconds", **SAVE) == 2002.0
    assert value("dcp_last_success_step", **SAVE) == 8
    assert value("dcp_failures_total", **TOTAL) == 1
    assert value("dcp_failures_total", **SAVE, phase="plan") == 0
    assert value("dcp_phase_duration_seconds_count", **SAVE, phase="plan") == 3
    assert value("dcp_phase_duration_seconds_sum", **TOTAL) == 4.0
    assert value("dcp_phase_duration_seconds_bucket", **TOTAL, le="1.0") == 0
    assert value("dcp_phase_duration_seconds_bucket", **TOTAL, le="3.0") == 2
    assert value("dcp_phase_last_duration_seconds", **SAVE, phase="write") == 1.5
    assert value("dcp_phase_last_own_duration_seconds", **SAVE, phase="write") == 0.25


def test_counters_are_there_as_soon_as_a_save_begins(events: Any, registry: CollectorRegistry) -> None:
    """The first failure is an increase then; from nothing to 1 is none."""
    emit(events()[:1])
    assert registry.get_sample_value("dcp_failures_total", TOTAL) == 0
    assert registry.get_sample_value("dcp_bytes_total", SAVE) == 0


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("/run/step-100", 100),
        ("s3://bucket/run/step_7/", 7),
        ("epoch=3-step=100.ckpt", 100),
        ("checkpoint-500", 500),
        ("iter_0000200", 200),
        ("/step-3/final", None),
        (None, None),
    ],
)
def test_the_step_is_read_from_the_last_part_of_the_id(
    events: Any, registry: CollectorRegistry, name: str | None, step: int | None
) -> None:
    emit([CheckpointEvent("save", "total", "finished", 0, name, seconds=1.0)])
    assert registry.get_sample_value("dcp_last_success_step", SAVE) == step
    assert registry.get_sample_value("dcp_last_success_timestamp_seconds", SAVE) is not None


def test_tiers_have_what_waits_for_them_and_what_came_last(registry: CollectorRegistry) -> None:
    dcp_telemetry.enable_prometheus(registry)
    for size in (900, 300):
        exporters.dcp_on_event(CheckpointEvent("promote", "waiting", "finished", 0, "s3://far/run", bytes=size))
    exporters.dcp_on_event(CheckpointEvent("promote", "total", "finished", 0, "s3://far/run/step-40", bytes=600))
    values = {sample.name: (sample.labels, sample.value) for metric in registry.collect() for sample in metric.samples}
    assert values["dcp_tier_waiting_bytes"] == ({"tier": "s3://far/run"}, 300)
    assert values["dcp_tier_last_step"] == ({"tier": "s3://far/run"}, 40)
    assert registry.get_sample_value("dcp_bytes_total", {"operation": "promote", "rank": "0"}) == 600
    text = [sample for metric in registry.collect() for sample in metric.samples if "waiting" in sample.labels.values()]
    assert not text


def test_enabled_again_it_begins_anew_and_disabled_it_is_gone(events: Any) -> None:
    for _ in range(2):
        dcp_telemetry.enable_prometheus()
        emit(events())
        assert REGISTRY.get_sample_value("dcp_bytes_total", SAVE) == 640
    dcp_telemetry.disable()
    assert REGISTRY.get_sample_value("dcp_bytes_total", SAVE) is None


def test_a_registry_with_metrics_of_these_names_is_refused_and_left_as_it_was() -> None:
    registry = CollectorRegistry(auto_describe=True)
    Counter("dcp_failures", "another's", registry=registry)
    with pytest.raises(ValueError, match="dcp_failures"):
        dcp_telemetry.enable_prometheus(registry)
    assert [metric.documentation for metric in registry.collect()] == ["another's"]


def test_saves_in_threads_are_all_counted(events: Any, registry: CollectorRegistry) -> None:
    threads = [threading.Thread(target=emit, args=[events(f"step-{number}")]) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("dcp_bytes_total", SAVE) == 40 * 640
    assert registry.get_sample_value("dcp_phase_duration_seconds_count", TOTAL) == 40
