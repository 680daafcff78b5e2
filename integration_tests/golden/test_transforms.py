"""What transforms of each version wrote stays readable, by us and by who knows only the page."""

from __future__ import annotations

import json

import pytest
import torch
import zstandard

import dcp_all as dcp
from dcp_io import verify_checkpoint
from integration_tests.golden.make_transforms import FOLDER, SETTINGS, digest
from integration_tests.golden.reference_reader import decode, read_checkpoint, read_stored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_our_reader_finds_every_value(name):
    template = {
        key: torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for key, (dtype, shape, _) in EXPECTED.items()
    }
    dcp.load(template, checkpoint_id=FOLDER / name)
    assert {key: digest(value) for key, value in template.items()} == {key: row[2] for key, row in EXPECTED.items()}
    assert verify_checkpoint(FOLDER / name).ok


@pytest.mark.parametrize("name", SETTINGS)
def test_a_reader_made_from_the_page_alone_does_too(name):
    def zstd(frame):
        return zstandard.ZstdDecompressor().stream_reader(frame).read()

    found = read_checkpoint(FOLDER / name / ".metadata")
    seen = set()
    for tensor in found.tensors:
        ((_, _, item),) = tensor.chunks
        data = read_stored(FOLDER / name, item)
        seen.update(item.chain)
        if item.chain:
            data = decode(item, data, zstd)
        assert item.framing == 0
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert digest(values) == EXPECTED[tensor.name][2], tensor.name
    assert seen == {name.replace("-", "/")}


def test_blocks_are_several_somewhere():
    found = read_checkpoint(FOLDER / "block.planes-1" / ".metadata")
    assert max(len(item.blocks) for tensor in found.tensors for *_, item in tensor.chunks) > 2
