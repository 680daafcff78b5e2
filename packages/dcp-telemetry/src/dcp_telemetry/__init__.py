"""Export spans and metrics of saves and loads to OpenTelemetry, and metrics to Prometheus.

Before `enable_opentelemetry` or `enable_prometheus`, nothing is exported, and neither library is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_telemetry.exporters import dashboard as dashboard
    from dcp_telemetry.exporters import disable as disable
    from dcp_telemetry.exporters import enable_opentelemetry as enable_opentelemetry
    from dcp_telemetry.exporters import enable_prometheus as enable_prometheus

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_telemetry.exporters": ("dashboard", "disable", "enable_opentelemetry", "enable_prometheus"),
    },
)
