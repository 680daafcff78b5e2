"""`stream.zstd/1`: lossless for any cut of the stream, and strict about its options."""

from __future__ import annotations

import io

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core import plugins
from dcp_core.transforms import ExtensionRegistry
from dcp_transforms import ZStandard


def encoded(transform: ZStandard, pieces: list[bytes]) -> bytes:
    output = io.BytesIO()
    with transform.transform_to(output) as stream:
        for piece in pieces:
            stream.write(piece)
    assert not output.closed
    return output.getvalue()


def decoded(data: bytes, step: int = 1 << 20) -> bytes:
    stream = ZStandard().transform_from(io.BytesIO(data))
    return b"".join(iter(lambda: stream.read(step), b""))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=3000), max_size=5),
    st.sampled_from([-100, -1, 0, 3, 19]),
    st.booleans(),
    st.integers(1, 5000),
)
def test_what_goes_in_comes_out(pieces: list[bytes], level: int, checksum: bool, step: int) -> None:
    transform = ZStandard(level, checksum=checksum)
    assert decoded(encoded(transform, pieces), step) == b"".join(pieces)
    assert zstandard.ZstdDecompressor().stream_reader(encoded(transform, pieces)).read() == b"".join(pieces)


def test_frames_one_after_another_are_one_stream() -> None:
    assert decoded(encoded(ZStandard(), [b"a" * 99]) + encoded(ZStandard(), [b"b"])) == b"a" * 99 + b"b"


def test_threads_make_no_difference_to_readers() -> None:
    data = bytes(range(256)) * 40_000
    assert decoded(encoded(ZStandard(threads=2), [data])) == data


def test_a_wrong_content_is_noticed() -> None:
    data = bytearray(encoded(ZStandard(), [bytes(1000) + bytes(range(256))]))
    data[-1] ^= 1
    with pytest.raises(zstandard.ZstdError):
        decoded(bytes(data))


@pytest.mark.parametrize("options", [{"level": 23}, {"level": -101}, {"threads": -1}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ZStandard(**options)


def test_it_is_found_by_its_descriptor() -> None:
    descriptor = ZStandard(7).get_descriptor()
    assert descriptor == "stream.zstd/1"
    assert plugins.transform(descriptor) is ZStandard
    (found,) = ExtensionRegistry().from_descriptor_list([descriptor])
    assert isinstance(found, ZStandard)
    assert ZStandard.is_available()
    assert isinstance(ZStandard.from_descriptor("1.4"), ZStandard)
    with pytest.raises(ValueError, match="version '2'"):
        ZStandard.from_descriptor("2")
