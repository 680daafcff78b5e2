"""Start and stop the export of spans and metrics."""

from __future__ import annotations

import threading
from importlib.resources import files
from typing import TYPE_CHECKING, Protocol

from dcp_base import CheckpointEvent, hookimpl, installed
from dcp_base.logs import logger

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

_OBSERVER = "dcp-telemetry"
_OPENTELEMETRY, _PROMETHEUS = "opentelemetry", "prometheus"


class Exporter(Protocol):
    """Contract of a thread-safe telemetry exporter."""

    def observe(self, event: CheckpointEvent) -> None:
        """Export one event as spans or metrics."""

    def close(self) -> None:
        """Unregister the metrics and end open spans. Threads may still call `observe` afterwards."""


class Exporters:
    """Enabled exporters by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enabled: dict[str, Exporter] = {}

    def enable(self, name: str, exporter: Exporter) -> None:
        """Add an exporter; `disable` one of the same name first."""
        with self._lock:
            if not self._enabled:
                installed.register(self, name=_OBSERVER)
            self._enabled = {**self._enabled, name: exporter}

    def disable(self, *names: str) -> None:
        """Remove and close exporters; ignore unknown names."""
        with self._lock:
            before = self._enabled
            self._enabled = {name: exporter for name, exporter in before.items() if name not in names}
            if before and not self._enabled:
                installed.unregister(_OBSERVER)
        for name in {*names} & before.keys():
            before[name].close()

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Pass an event, except `progress`, to every exporter, and log errors."""
        if event.state == "progress":  # only for progress bars
            return
        for name, exporter in self._enabled.items():
            try:
                exporter.observe(event)
            except Exception:  # noqa: BLE001 - a save never fails because of its telemetry
                logger.warning("the exporter %r of dcp_telemetry failed", name, exc_info=True)


exporters = Exporters()


def enable_opentelemetry(
    *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Export this process's future saves and loads as OpenTelemetry spans and metrics.

    ```python
    import dcp_telemetry

    dcp_telemetry.enable_opentelemetry()  # OTEL_EXPORTER_OTLP_ENDPOINT and others set the destination
    ```

    Each save or load is a span with a child per phase. In the foreground, it is a child of the current span. A repeated
    call replaces the providers; None stands for the global ones.

    Raises:
        ImportError: `opentelemetry-api` is not installed.

    Ranks: this rank only.
    """
    try:
        from dcp_telemetry.opentelemetry_exporter import OpenTelemetryExporter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise _not_installed(error, "opentelemetry-api", _OPENTELEMETRY) from error
    exporter = OpenTelemetryExporter(tracer_provider, meter_provider)
    exporters.disable(_OPENTELEMETRY)
    exporters.enable(_OPENTELEMETRY, exporter)


def enable_prometheus(registry: CollectorRegistry | None = None) -> None:
    """Export this process's future saves and loads as Prometheus metrics: counts, durations, bytes.

    ```python
    import dcp_telemetry

    dcp_telemetry.enable_prometheus()
    ```

    The application serves them, with `prometheus_client.start_http_server`. A repeated call discards earlier metrics.

    Args:
        registry: None for `prometheus_client.REGISTRY`.

    Raises:
        ImportError: `prometheus-client` is not installed.
        ValueError: The registry has other metrics with the same names.

    Ranks: this rank only.
    """
    try:
        from dcp_telemetry.prometheus_exporter import PrometheusExporter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise _not_installed(error, "prometheus-client", _PROMETHEUS) from error
    exporters.disable(_PROMETHEUS)
    exporters.enable(_PROMETHEUS, PrometheusExporter(registry))


def disable() -> None:
    """Stop the export, and remove the Prometheus metrics from their registry."""
    exporters.disable(_OPENTELEMETRY, _PROMETHEUS)


def _not_installed(error: ImportError, package: str, extra: str) -> ImportError:
    return ImportError(f"{error}: pip install {package}, which the extra {extra!r} of dcp-telemetry brings")


def dashboard() -> str:
    """Return JSON of a Grafana dashboard for `enable_prometheus`, to import in Grafana."""
    return (files("dcp_telemetry") / "dashboards" / "dcp.json").read_text(encoding="utf-8")
