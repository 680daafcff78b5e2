"""The dashboard for Grafana, which is a file in this package."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return a Grafana dashboard over the metrics of `enable_prometheus`, as JSON to import.

    The data source is selected in Grafana, through a variable of the dashboard.
    """
    return (files("dcp_telemetry") / "dashboards" / "dcp.json").read_text(encoding="utf-8")
