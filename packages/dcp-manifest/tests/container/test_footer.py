from __future__ import annotations

import pytest

from dcp_manifest import CorruptCheckpointError
from dcp_manifest.container.footer import FOOTER_BYTES, Footer, read_footer

FOOTER = Footer(1000, 2000, 1, 2, 3, 1)


def test_it_has_64_bytes_at_fixed_places():
    data = FOOTER.to_bytes()
    assert len(data) == FOOTER_BYTES == 64
    assert data[:16] == b"\x93DCPMAN\n" + bytes([1, 0, 0, 0, 1, 0, 0, 0])
    assert data[16:44] == bytes.fromhex("e803000000000000 d007000000000000 01000000 02000000 03000000")
    assert data[44:56] == bytes(12)
    assert data[60:] == b"DCP\x93"


def test_it_is_read_back():
    assert read_footer(FOOTER.to_bytes(), size=3064, file="f") == FOOTER


@pytest.mark.parametrize("size", [0, 63, 64, 3063, 3065, 10**12])
def test_it_must_fit_the_file(size):
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        read_footer(FOOTER.to_bytes(), size=size, file="f")


@pytest.mark.parametrize("tail", [b"", b"x" * 63, b"x" * 64])
def test_other_files_have_none(tail):
    assert read_footer(tail, size=100, file="f") is None


def test_every_flip_is_noticed():
    for place in range(64):
        data = bytearray(FOOTER.to_bytes())
        data[place] ^= 4
        with pytest.raises(CorruptCheckpointError):
            read_footer(bytes(data), size=3064, file="f")
