"""The dashboard for Grafana, which is a file in this package."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return the JSON text of a Grafana dashboard that shows the metrics of `enable_prometheus`.

    Import the text in Grafana, then select the Prometheus data source in the dashboard's variable.
    """
    return (files("dcp_telemetry") / "dashboards" / "dcp.json").read_text(encoding="utf-8")
