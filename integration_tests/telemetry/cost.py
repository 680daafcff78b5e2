"""What telemetry adds to a save of 20,000 scalars: `python -m integration_tests.telemetry.cost`.

Saves without and with it in turns, and the time that its observer takes of each: whole saves vary by more than it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import dcp_all as dcp
import dcp_telemetry
from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent
from dcp_telemetry import plugin
from dcp_telemetry.exporters import exporters

SCALARS = 20_000


def enable_opentelemetry() -> None:
    """As an application does: spans are sent by a thread, metrics are collected now and then."""
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    dcp_telemetry.enable_opentelemetry(
        tracer_provider=tracers, meter_provider=MeterProvider(metric_readers=[InMemoryMetricReader()])
    )


def enable_both() -> None:
    enable_opentelemetry()
    dcp_telemetry.enable_prometheus(CollectorRegistry())


KINDS: dict[str, Callable[[], None]] = {
    "not enabled": dcp_telemetry.disable,
    "OpenTelemetry": enable_opentelemetry,
    "Prometheus": lambda: dcp_telemetry.enable_prometheus(CollectorRegistry()),
    "both": enable_both,
}


class Timed:
    """The observer of the package, timed: it replaces what the plug-in passes events on to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.passes_on = exporters.observe
        exporters.observe = self.observe  # type: ignore[method-assign]

    def observe(self, event: CheckpointEvent) -> None:
        start = time.perf_counter()
        self.passes_on(event)
        self.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    state = {f"value {number}": number for number in range(SCALARS)}
    timed = Timed()
    if not any(info.module == plugin.__name__ for info in plugins.list()):
        plugins.register(plugin, name="telemetry")  # it has no entry point until installed
    saves: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for kind, enable in KINDS.items():
                dcp_telemetry.disable()
                enable()
                timed.seconds = 0.0
                start = time.perf_counter()
                dcp.save(state, checkpoint_id=Path(folder) / "step-1")
                seconds = time.perf_counter() - start
                if number:  # the first one imports
                    saves[kind].append(seconds)
                    shares[kind].append(timed.seconds / seconds)
    dcp_telemetry.disable()
    base = statistics.median(saves["not enabled"])
    print(f"save of {SCALARS:,} scalars, medians of {rounds} in turns; {base * 1e3:.1f} ms without telemetry")
    for kind in KINDS:
        ratios = [save / without for save, without in zip(saves[kind], saves["not enabled"], strict=True)]
        print(
            f"{kind:14} whole save {statistics.median(ratios):.3f} of one without, "
            f"the observer's part {statistics.median(shares[kind]):.3%} (at most {max(shares[kind]):.3%})"
        )


if __name__ == "__main__":
    main()
