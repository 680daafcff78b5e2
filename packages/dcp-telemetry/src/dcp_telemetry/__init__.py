"""Telemetry of saves and loads: exports spans and metrics to OpenTelemetry, and metrics to Prometheus.

`enable_opentelemetry` and `enable_prometheus` start the export. Before one of these calls, nothing is exported, and
neither of the two libraries is imported. The libraries' providers and registries decide where spans and metrics go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_telemetry.enabling import disable, enable_opentelemetry, enable_prometheus
    from dcp_telemetry.grafana import dashboard

__all__ = ["dashboard", "disable", "enable_opentelemetry", "enable_prometheus"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_telemetry.grafana": ("dashboard",),
        "dcp_telemetry.enabling": ("disable", "enable_opentelemetry", "enable_prometheus"),
    },
)
