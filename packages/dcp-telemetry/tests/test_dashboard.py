"""The dashboard asks for nothing that is not exported."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import dcp_telemetry
from dcp_telemetry.exporters import exporters

pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from prometheus_client import CollectorRegistry

METRIC = re.compile(r"\b(dcp_\w+)(?:\{([^}]*)\})?")
OF_THE_SCRAPE = {"job"}  # labels that Prometheus itself adds


@pytest.fixture
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dcp_telemetry.dashboard())
    return found


def queries(board: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return asked + [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]


def test_every_metric_and_label_that_it_queries_is_exported(board: dict[str, Any], events: Any) -> None:
    registry = CollectorRegistry()
    dcp_telemetry.enable_prometheus(registry)
    for event in [*events(), *events("step-8", error="OSError: full")]:
        exporters.dcp_on_event(event)
    samples = [sample for family in registry.collect() for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    phases = {sample.labels["phase"] for sample in samples if "phase" in sample.labels} | {"read"}
    asked = queries(board)
    assert len(asked) >= 10
    for query in asked:
        for name, matchers in METRIC.findall(query):
            assert name in labels, query
            pairs = dict(re.findall(r"(\w+)=~?\"([^\"]*)\"", matchers))
            assert pairs.keys() <= labels[name] | OF_THE_SCRAPE, query
            assert pairs.get("phase", "total") in phases, query
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            (name,) = {name for name, _ in METRIC.findall(query)}
            assert {*grouped.split(", ")} <= labels[name], query


def test_it_shows_what_is_promised(board: dict[str, Any]) -> None:
    titles = " · ".join(panel["title"].lower() for panel in board["panels"])
    for promised in ("by phase and rank", "bytes per second", "slowest rank", "failed saves", "age of the last"):
        assert promised in titles


def test_grafana_can_import_it(board: dict[str, Any]) -> None:
    """It fits on the grid, ids are unique, and every variable that is used is defined."""
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*cells}) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    defined = {each["name"] for each in board["templating"]["list"]} | {"__range", "__all"}
    assert {*re.findall(r"\$\{?(\w+)", json.dumps(board))} <= defined
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
