"""Functions with which an application starts and stops the export of spans and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_telemetry.exporters import exporters

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

__all__ = ["disable", "enable_opentelemetry", "enable_prometheus"]

_OPENTELEMETRY, _PROMETHEUS = "opentelemetry", "prometheus"


def enable_opentelemetry(
    *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Export every save and load of this process from now on as spans and metrics of OpenTelemetry.

    Each save or load has a span, which contains a span for each phase. The span of a load, or of a save in the
    foreground, is a child of the span that is current when `load` or `save` is called. A repeated call of this function
    replaces the providers.

    Args:
        tracer_provider: Provider that gets the spans; None for OpenTelemetry's global tracer provider.
        meter_provider: Provider that gets the metrics; None for OpenTelemetry's global meter provider.

    Raises:
        ImportError: `opentelemetry-api` is not installed.

    Ranks: affects this rank only; call it on each rank whose saves and loads are to be exported.

    Example:
        ```python
        import dcp_telemetry

        dcp_telemetry.enable_opentelemetry()  # OTEL_EXPORTER_OTLP_ENDPOINT and others set the destination
        ```
    """
    try:
        from dcp_telemetry.opentelemetry_exporter import OpenTelemetryExporter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise _not_installed(error, "opentelemetry-api", _OPENTELEMETRY) from error
    exporter = OpenTelemetryExporter(tracer_provider, meter_provider)
    exporters.disable(_OPENTELEMETRY)
    exporters.enable(_OPENTELEMETRY, exporter)


def enable_prometheus(registry: CollectorRegistry | None = None) -> None:
    """Export every save and load of this process from now on as Prometheus metrics: counts, durations, bytes.

    The application serves the metrics over HTTP, with `prometheus_client.start_http_server`. A repeated call of this
    function discards the metrics of the earlier call.

    Args:
        registry: Registry that gets the metrics; None for the global registry, `prometheus_client.REGISTRY`.

    Raises:
        ImportError: `prometheus-client` is not installed.
        ValueError: The registry has other metrics with the same names.

    Ranks: affects this rank only; call it on each rank whose saves and loads are to be exported.

    Example:
        ```python
        import dcp_telemetry

        dcp_telemetry.enable_prometheus()
        ```
    """
    try:
        from dcp_telemetry.prometheus_exporter import PrometheusExporter  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise _not_installed(error, "prometheus-client", _PROMETHEUS) from error
    exporters.disable(_PROMETHEUS)
    exporters.enable(_PROMETHEUS, PrometheusExporter(registry))


def disable() -> None:
    """Stop exporting spans and metrics from this process, and remove the Prometheus metrics from their registry."""
    exporters.disable(_OPENTELEMETRY, _PROMETHEUS)


def _not_installed(error: ImportError, package: str, extra: str) -> ImportError:
    return ImportError(f"{error}: pip install {package}, which the extra {extra!r} of dcp-telemetry brings")
