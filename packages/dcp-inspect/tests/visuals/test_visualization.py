from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_inspect import visualize
from dcp_inspect.visuals.picture import EACH, Row, draw_holders
from dcp_manifest import CheckpointNotFoundError

Write = Callable[..., Path]


SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[str, str, float, float]]:
    """What is drawn: tip, colour, share of the width and of the height of each box."""
    found = []
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            width, height = float(rect.attrib["width"]), float(rect.attrib["height"])
            found.append((str(tip.text), rect.attrib["fill"], width / 620, height / 34))
    return found


def texts(svg: str) -> list[str]:
    return [str(text.text) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_cuts_go_right_and_down_and_replicas_share_a_box() -> None:
    quarters = {((4 * i, 3 * j), (4, 3)): (2 * i + j,) for i in (0, 1) for j in (0, 1)}
    rows = [
        Row("rows", "float32", (8, 6), 4, {((0, 0), (2, 6)): (0,), ((2, 0), (6, 6)): (1,)}),
        Row("quarters", "float32", (8, 6), 4, quarters),
        Row("replicas", "float32", (8,), 4, {((0,), (8,)): (0, 1, 2, 3)}),
        Row("plain", "float32", (2,), 4, {((0,), (2,)): ()}, others=2),
    ]
    svg = draw_holders("title", rows, alone=EACH)
    shares = [(tip.split(":")[-1], round(width, 2), round(height, 2)) for tip, _, width, height in boxes(svg)]
    assert shares == [
        *[(" rank 0", 0.25, 1), (" rank 1", 0.75, 1)],
        *[(f" rank {rank}", 0.5, 0.5) for rank in range(4)],
        *[(f" rank {rank}", 1, 0.25) for rank in range(4)],
        (" each rank", 1, 1),
    ]
    colours = {tip.split(":")[-1]: colour for tip, colour, _, _ in boxes(svg)}
    assert len({*colours.values()}) == 5
    assert {"3 × float32 [2], 8 B", "float32 [8], 32 B, on 4 ranks"} <= {*texts(svg)}
    assert [text for text in texts(svg) if text.startswith("rank 0")] == [f"rank 0: {48 + 48 + 32 + 24} B"]


def test_scalars_empty_tensors_and_long_lists_are_drawn() -> None:
    rows = [Row("s", "int64", (), 8, {((), ()): (0,)}), Row("e", "int64", (0, 3), 8, {((0, 0), (0, 3)): (0,)})]
    assert len(boxes(draw_holders("x", rows, alone=EACH))) == 2
    assert draw_holders("x", [], alone=EACH).startswith("<svg")
    many = [Row(f"t{n}", "int64", (n,), 8, {((0,), (n,)): (n,)}) for n in range(100)]
    drawn = texts(draw_holders("x", many, alone=EACH))
    assert "and 52 more kinds of tensors" in drawn


def test_a_checkpoint_is_drawn_without_torch_and_saved(write: Write, tmp_path: Path) -> None:
    picture = visualize(write(tmp_path / "step-7"))
    assert repr(picture).startswith("<Picture of step-7: 2 tensors, 1 object:")
    drawn = [tip for tip, *_ in boxes(picture._repr_svg_())]
    assert drawn == [
        "model.weight[0, 0] + [2000, 16]: rank 0",
        "model.weight[2000, 0] + [2000, 16]: rank 0",
        "step[] + []: rank 0",
    ]
    picture.save(tmp_path / "a.svg")
    picture.save(tmp_path / "a.html")
    assert (tmp_path / "a.svg").read_text() == picture.svg
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    with pytest.raises(CheckpointNotFoundError):
        visualize(str(tmp_path / "nowhere"))


def test_names_cannot_break_the_picture() -> None:
    rows = [Row("<b>&\x1b", "int64", (1,), 8, {((0,), (1,)): (0,)})]
    svg = draw_holders("<i>\x07", rows, alone=EACH)
    ET.fromstring(svg)
    assert "\x1b" not in svg


def test_what_has_a_state_dict_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def find_holders(state_dict: Any, rank: int) -> tuple[list[Any], int]:
        seen.append((state_dict, rank))
        layers = [(f"layers.{n}.w", "float32", (4,), 4, {((0,), (4,)): (0,)}) for n in range(3)]
        return [*layers, ("layers.w", "float32", (4,), 4, {((0,), (4,)): ()})], 2

    modules = {
        "dcp_core.state_dict.holders": SimpleNamespace(find_holders=find_holders),
        "torch.distributed": SimpleNamespace(is_available=lambda: False),
    }
    imports = SimpleNamespace(import_module=modules.__getitem__)
    monkeypatch.setattr("dcp_inspect.visuals.visualization.importlib", imports)
    picture = visualize(SimpleNamespace(state_dict=lambda: {"a": 1}))
    assert seen == [({"a": 1}, 0)]
    assert "4 tensors, 2 objects" in picture.title
    assert len(boxes(picture.svg)) == 2  # those that differ in a number only are drawn once
    assert "3 × float32 [4], 16 B" in texts(picture.svg)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(TypeError, match="a int has no state_dict"):
        visualize(7)
