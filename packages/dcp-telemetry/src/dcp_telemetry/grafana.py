"""Dashboard for Grafana: the function `dashboard` returns its JSON text, which is a file in this package."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return the JSON text of a Grafana dashboard that shows the metrics of `enable_prometheus`.

    Import the text in Grafana, and select the Prometheus data source in the dashboard's field "Data source".
    """
    return (files("dcp_telemetry") / "dashboards" / "dcp.json").read_text(encoding="utf-8")
