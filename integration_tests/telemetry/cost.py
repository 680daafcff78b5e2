"""What events, progress and their listeners add to a save: `python -m integration_tests.telemetry.cost`.

Saves of 1 GiB and of 20,000 scalars, with each combination of listeners in turns. Whole saves vary by more than the
listeners take, so the processor time that events and progress take themselves is measured, too, as a share of the
processor time of the save.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import dcp_all as dcp
import dcp_telemetry
from dcp_base import PluginRegistry, registry
from dcp_base.progress import Progress
from dcp_inspect.visuals import progress_bar

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "1 GiB in 64 tensors": lambda: {f"layer {n}": torch.ones(4 << 20) for n in range(64)},
    "20,000 scalars": lambda: {f"value {n}": n for n in range(20_000)},
}


def enable_opentelemetry() -> None:
    """As an application does: spans are sent by a thread, metrics are collected now and then."""
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    dcp_telemetry.enable_opentelemetry(
        tracer_provider=tracers, meter_provider=MeterProvider(metric_readers=[InMemoryMetricReader()])
    )


def enable_prometheus() -> None:
    dcp_telemetry.enable_prometheus(CollectorRegistry())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def bars() -> Iterator[None]:
    """Bars of all saves, drawn at once, as if this were a terminal."""
    seen = SimpleNamespace(stderr=Terminal(), modules={})
    with (
        mock.patch.object(registry, "sys", seen),
        mock.patch.object(progress_bar, "sys", seen),
        mock.patch.object(progress_bar, "AFTER_SECONDS", 0),
    ):
        yield


@contextmanager
def no_observers() -> Iterator[None]:
    """A registry without observers."""
    with mock.patch.object(PluginRegistry, "observed", False), mock.patch.object(PluginRegistry, "emit"):
        yield


LISTENERS: dict[str, tuple[Callable[[], Any], ...]] = {
    "no observers": (no_observers,),
    "nothing enabled": (),
    "bar": (bars,),
    "OpenTelemetry": (enable_opentelemetry,),
    "Prometheus": (enable_prometheus,),
    "all": (bars, enable_opentelemetry, enable_prometheus),
}


class Timed:
    """The processor time within events and progress, of all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        emit, count = PluginRegistry.emit, Progress.__call__

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                start = time.thread_time()
                try:
                    return function(*arguments)
                finally:
                    self.seconds += time.thread_time() - start

            return call

        # Events of progress are within its calls.
        PluginRegistry.emit = lambda *all_: (emit if all_[1].state == "progress" else timed(emit))(*all_)  # type: ignore[method-assign]
        Progress.__call__ = timed(count)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="Where to save; default: the temporary folder.")
    options = parser.parse_args()
    timed = Timed()
    for title, make in STATES.items():
        state = make()
        saves: dict[str, list[float]] = {name: [] for name in LISTENERS}
        shares: dict[str, list[float]] = {name: [] for name in LISTENERS}
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for number in range(options.rounds + 1):
                for name, listeners in LISTENERS.items():
                    seconds, processor_seconds = save_once(state, Path(folder) / "step-1", listeners, timed)
                    if number:  # the first one imports
                        saves[name].append(seconds)
                        shares[name].append(timed.seconds / processor_seconds)
        report(title, saves, shares)


def save_once(
    state: dict[str, Any], place: Path, listeners: tuple[Callable[[], Any], ...], timed: Timed
) -> tuple[float, float]:
    """Save with these listeners; returns the seconds, and those of processors."""
    dcp_telemetry.disable()
    with ExitStack() as stack:
        for listen in listeners:
            found = listen()
            if found is not None:
                stack.enter_context(found)
        timed.seconds = 0.0
        start, processor_start = time.perf_counter(), time.process_time()
        dcp.save(state, checkpoint_id=place)
        seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    dcp_telemetry.disable()
    return seconds, processor_seconds


def report(title: str, saves: dict[str, list[float]], shares: dict[str, list[float]]) -> None:
    base = saves["no observers"]
    print(f"{title}: medians of {len(base)} in turns; {statistics.median(base) * 1e3:.0f} ms without observers")
    for name, seconds in saves.items():
        ratios = [one / without for one, without in zip(seconds, base, strict=True)]
        print(
            f"  {name:16} whole save × {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"in events and progress {statistics.median(shares[name]):.3%} (at most {max(shares[name]):.3%})"
        )


if __name__ == "__main__":
    main()
