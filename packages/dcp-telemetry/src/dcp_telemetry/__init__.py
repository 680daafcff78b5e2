"""Telemetry of saves and loads: `enable_opentelemetry` exports spans and metrics, `enable_prometheus` metrics.

Nothing is exported, and neither library imported, before one of these calls. Where spans and metrics go is decided by
the providers and registries of the two libraries, never here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_telemetry.dashboard import dashboard
    from dcp_telemetry.enabling import disable, enable_opentelemetry, enable_prometheus

__all__ = ["dashboard", "disable", "enable_opentelemetry", "enable_prometheus"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_telemetry.dashboard": ("dashboard",),
        "dcp_telemetry.enabling": ("disable", "enable_opentelemetry", "enable_prometheus"),
    },
)
