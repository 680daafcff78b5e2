"""The dashboard for Grafana, a file of this package."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return a Grafana dashboard over the metrics of `enable_prometheus`, as JSON to import.

    Its data source is chosen in Grafana, by a variable of the dashboard.
    """
    return (files("dcp_telemetry") / "dashboards" / "dcp.json").read_text(encoding="utf-8")
