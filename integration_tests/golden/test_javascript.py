"""The page about the format is enough for another language: a reader in JavaScript finds what ours finds."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration_tests.golden.test_golden import HERE, OURS, name, shown
from integration_tests.kits.damage import flip

NODE = shutil.which("node")
HAS_CRC = (
    NODE is not None
    and not subprocess.run([NODE, "-e", "process.exit(require('zlib').crc32 ? 0 : 1)"], check=False).returncode
)

pytestmark = pytest.mark.skipif(not HAS_CRC, reason="needs node 20.15 or newer (zlib.crc32)")


def read(folder: Path, index: str) -> subprocess.CompletedProcess[str]:
    command = [str(NODE), str(HERE / "reader.mjs"), str(folder), index]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def row_of(tensor: dict[str, Any]) -> dict[str, Any]:
    """A tensor as the expectation has it: bytes of each chunk in place of items."""
    shared = {key: tensor[key] for key in ("name", "owner", "dtype", "flags", "shape")}
    data = [shown(bytes.fromhex(item["data"])) for item in tensor["items"]]
    return {**shared, "boxes": tensor["boxes"], "data": data}


@pytest.mark.parametrize("expected", OURS, ids=name)
def test_a_reader_in_javascript_finds_everything(expected: Path) -> None:
    ran = read(expected.parent, expected.name.removeprefix("expected").removesuffix(".json"))
    assert ran.returncode == 0, ran.stderr
    found, wanted = json.loads(ran.stdout), json.loads(expected.read_text())
    assert [row_of(tensor) for tensor in found["tensors"]] == wanted["tensors"]
    assert [(row["name"], row["owner"]) for row in found["objects"]] == [
        (row["name"], row["owner"]) for row in wanted["objects"]
    ]
    assert len(found["object_items"]) == len(wanted["objects"])
    assert found["aliases"] == wanted["aliases"]


@pytest.mark.parametrize("at", [-1, -30, -100])
def test_it_notices_damage(at: int, tmp_path: Path) -> None:
    folder = shutil.copytree(HERE / "format-1.0" / "raw", tmp_path / "raw")
    flip(folder / ".metadata", at)
    ran = read(folder, ".metadata")
    assert ran.returncode != 0
    assert "Error: " in ran.stderr
