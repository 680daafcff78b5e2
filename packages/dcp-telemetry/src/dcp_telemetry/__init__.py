"""Telemetry of saves and loads: `enable_opentelemetry` exports spans and metrics, `enable_prometheus` metrics.

Before one of these calls, nothing is exported, and neither library is imported. The providers and registries of the two
libraries decide where spans and metrics go.
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
