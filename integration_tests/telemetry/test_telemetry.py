"""Spans of real saves arrive in a collector, with the right parents, whatever saves them."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
import dcp_telemetry
from dcp_async import AsyncSaver
from dcp_fs import FileSystemWriter

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

PHASES = {"save": ["plan", "write"], "load": ["plan", "read", "load_state_dict"]}


@contextmanager
def telemetry() -> Iterator[tuple[InMemorySpanExporter, CollectorRegistry]]:
    """A collector of spans and a registry of metrics, in this process."""
    spans, provider, registry = InMemorySpanExporter(), TracerProvider(), CollectorRegistry()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    dcp_telemetry.enable_opentelemetry(tracer_provider=provider)
    dcp_telemetry.enable_prometheus(registry)
    try:
        yield spans, registry
    finally:
        dcp_telemetry.disable()
        provider.shutdown()


def trees(spans: InMemorySpanExporter) -> list[tuple[ReadableSpan, list[ReadableSpan]]]:
    """Each whole operation with its phases, by their ends."""
    found = spans.get_finished_spans()
    roots = [span for span in found if span.parent is None]
    inside = {
        root.context.span_id: [each for each in found if each.parent and each.parent.span_id == root.context.span_id]
        for root in roots
    }
    assert len(found) == len(roots) + sum(map(len, inside.values()))
    return [(root, inside[root.context.span_id]) for root in roots]


def described(spans: InMemorySpanExporter) -> list[tuple[str, dict[str, Any], list[str]]]:
    """The same, in what can be sent: name and attributes of the operation, names of its phases."""
    described = []
    for root, phases in trees(spans):
        assert all(root.start_time <= each.start_time <= each.end_time <= root.end_time for each in phases)
        described.append((root.name, dict(root.attributes or {}), [each.name for each in phases]))
    return described


def save_and_load(folder: str) -> tuple[list[tuple[str, dict[str, Any], list[str]]], str]:
    """What one rank's collector holds after a save and a load, and what is served to Prometheus there."""
    with telemetry() as (spans, registry):
        dcp.save({"x": dcp.PerRank(torch.full((100,), float(dist.get_rank())))}, checkpoint_id=folder)
        dcp.load({"x": dcp.PerRank(torch.zeros(100))}, checkpoint_id=folder)
        server, thread = start_http_server(0, "127.0.0.1", registry)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=250) as answer:
            text = answer.read().decode()
        server.shutdown()
        server.server_close()
        thread.join()
        return described(spans), text


def test_four_ranks_send_spans_and_serve_metrics(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-7")
    for rank, (found, text) in enumerate(ranks.run(4, save_and_load, folder)):
        assert [name for name, _, _ in found] == ["dcp.save", "dcp.load"]
        for (name, attributes, phases), least in zip(found, (400, 400), strict=True):
            assert phases == [f"{name}.{phase}" for phase in PHASES[name.removeprefix("dcp.")]]
            assert attributes["dcp.rank"] == rank
            assert attributes["dcp.world_size"] == 4
            assert attributes["dcp.checkpoint.id"] == folder
            assert attributes["dcp.bytes"] >= least
        samples = {
            (sample.name, sample.labels.get("phase"), sample.labels["operation"]): (sample.labels["rank"], sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["dcp_last_success_step", None, "save"] == (str(rank), 7)
        assert samples["dcp_phase_duration_seconds_count", "write", "save"] == (str(rank), 1)
        assert samples["dcp_failures_total", "total", "load"] == (str(rank), 0)
        assert samples["dcp_bytes_total", None, "save"][1] == found[0][1]["dcp.bytes"]


class Meeting(FileSystemWriter):
    """A writer that waits, in the middle of its save, until the other one is there as well."""

    def __init__(self, place: Path, barrier: threading.Barrier) -> None:
        super().__init__(place)
        self.barrier = barrier

    def write_data(self, *arguments: Any) -> Any:
        self.barrier.wait(120)
        return super().write_data(*arguments)


def test_saves_in_two_threads_at_a_time_keep_their_phases(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    with telemetry() as (spans, _), AsyncSaver("thread") as first, AsyncSaver("thread") as second:
        names = ("a", "b")
        futures = [
            saver.save({"x": torch.ones(3)}, storage_writer=Meeting(tmp_path / name, barrier))
            for name, saver in zip(names, (first, second), strict=True)
        ]
        for future in futures:
            assert future is not None
            future.result()
    found = trees(spans)
    assert {Path((root.attributes or {})["dcp.checkpoint.id"]).name for root, _ in found} == {*names}  # type: ignore[arg-type]
    for root, phases in found:
        assert [each.name for each in phases] == ["dcp.save.plan", "dcp.save.write"]
        for each in phases:
            assert (each.attributes or {})["dcp.checkpoint.id"] == (root.attributes or {})["dcp.checkpoint.id"]
    (one, _), (other, _) = found
    assert max(one.start_time or 0, other.start_time or 0) < min(one.end_time or 0, other.end_time or 0)


def test_a_save_in_a_process_sends_its_spans_from_the_trainer(tmp_path: Path) -> None:
    with telemetry() as (spans, registry):
        with AsyncSaver("process") as saver:
            for step in (1, 2):
                saved = saver.save({"x": torch.ones(100)}, checkpoint_id=tmp_path / f"step-{step}")
                assert saved is not None
                saved.result()
        found = described(spans)
        assert [(name, phases) for name, _, phases in found] == [("dcp.save", ["dcp.save.plan", "dcp.save.write"])] * 2
        assert registry.get_sample_value("dcp_last_success_step", {"operation": "save", "rank": "0"}) == 2


class Stuck(FileSystemWriter):
    """A writer that never comes to an end, and says when it has begun."""

    def write_data(self, *arguments: Any) -> Any:
        (Path(str(self.checkpoint_id)).parent / "begun").touch()
        threading.Event().wait()


def test_a_save_whose_process_is_killed_is_a_failure(tmp_path: Path) -> None:
    with telemetry() as (spans, registry), AsyncSaver("process") as saver:
        future = saver.save({"x": torch.ones(100)}, storage_writer=Stuck(tmp_path / "step-1"))
        assert future is not None
        while not (tmp_path / "begun").exists():
            assert not future.done(), future.exception()
            time.sleep(0.05)
        os.kill(saver.backend.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert "SIGKILL" in str(future.exception())
        ((root, phases),) = trees(spans)
        assert [(each.name, each.status.is_ok) for each in phases] == [
            ("dcp.save.plan", True),
            ("dcp.save.write", False),
        ]
        assert "SIGKILL" in str(root.status.description)
        assert (root.attributes or {})["error.type"] == "WorkerLostError"
        labels = {"operation": "save", "phase": "total", "rank": "0"}
        assert registry.get_sample_value("dcp_failures_total", labels) == 1
        saver.save({"x": torch.ones(100)}, checkpoint_id=tmp_path / "step-2").result()  # type: ignore[union-attr]
        assert len(trees(spans)) == 2
        assert registry.get_sample_value("dcp_failures_total", labels) == 1


def test_a_save_that_cannot_reach_its_process_is_one_failure(tmp_path: Path) -> None:
    """A writer that cannot be pickled: the process hears nothing of the save."""
    with telemetry() as (spans, registry), AsyncSaver("process") as saver:
        writer = Meeting(tmp_path / "step-1", threading.Barrier(1))
        future = saver.save({"x": torch.ones(1)}, storage_writer=writer)
        assert future is not None
        assert future.exception() is not None
        ((root, phases),) = trees(spans)
        assert (root.name, root.status.is_ok, phases) == ("dcp.save", False, [])
        labels = {"operation": "save", "phase": "total", "rank": "0"}
        assert registry.get_sample_value("dcp_failures_total", labels) == 1
