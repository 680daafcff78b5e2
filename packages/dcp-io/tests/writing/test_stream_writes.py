"""Payloads through encoders: order, memory, and leftovers when an encoder fails."""

from __future__ import annotations

import io
import os
import zlib

import pytest

from dcp_io.archives.zip_format import tensor_frame
from dcp_io.writing.encoded_data import encode_payload


class Marking:
    """Encoder that puts its name before and after the bytes of a stream."""

    def __init__(self, name: bytes, fails: str = "") -> None:
        self.name = name
        self.fails = fails

    def get_descriptor(self):
        return self.name.decode()

    def transform_to(self, output):
        outer = self

        class Stream(io.BytesIO):
            def close(self):
                if outer.fails == "close" and not self.closed:
                    super().close()
                    raise OSError("cannot end")
                if not self.closed:
                    output.write(outer.name + self.getvalue() + outer.name)
                super().close()

            def write(self, data):
                if outer.fails == "write":
                    raise OSError("cannot write")
                return super().write(data)

        return Stream()


def whole(data, max_bytes=1 << 20):
    return b"".join(bytes(piece) for piece in data.pieces(max_bytes))


def test_the_first_encoder_writes_to_the_file():
    made = encode_payload(b"data", None, [Marking(b"1"), Marking(b"2")], 1 << 20)
    assert made.nbytes == 8
    assert whole(made) == b"12data21"


def test_a_frame_goes_inside():
    frame = tensor_frame("uint8", (4,))
    made = encode_payload(memoryview(b"data"), frame, [Marking(b"#")], 1 << 20)
    assert whole(made) == b"#" + frame.prefix + b"data" + frame.suffix(zlib.crc32(b"data")) + b"#"


@pytest.mark.parametrize("limit", [1, 1000, 1 << 22])
def test_much_is_kept_outside_of_memory(limit):
    class Plain:
        def get_descriptor(self):
            return "plain"

        def transform_to(self, output):
            return output

    data = os.urandom(1 << 20)
    made = encode_payload(data, None, [Plain()], limit)
    assert made._kept._rolled == (limit < len(data))
    assert whole(made, limit) == data
    assert made._kept.closed


@pytest.mark.parametrize("fails", ["write", "close"])
def test_an_encoder_that_fails_leaves_nothing(fails):
    with pytest.raises(OSError, match="cannot"):
        encode_payload(b"data", None, [Marking(b"1"), Marking(b"2", fails)], 1 << 20)


def test_what_encoders_write_after_an_error_is_forgotten():
    made = encode_payload(b"data", None, [], 1 << 20)
    made.free()
    assert made.write(b"the end") == 7
    assert made.nbytes == 4
