"""Tables of strings as two columns: the strings concatenated as UTF-8, and the length of each string in bytes.

Lone surrogates, which Python's strings may hold, are encoded like other code points (`surrogatepass`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["decode_text", "encode_text", "pack_strings", "split_text", "unpack_strings"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


def encode_text(text: str) -> bytes:
    """Encode a string as the UTF-8 bytes of a table."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Decode a string of a table. Raises UnicodeDecodeError for bytes that are not UTF-8."""
    return data.decode("utf-8", "surrogatepass")


def pack_strings(strings: Iterable[str]) -> tuple[U8, U64]:
    """Pack strings into the two columns of a table: text and lengths."""
    encoded = [encode_text(text) for text in strings]
    lengths = np.fromiter(map(len, encoded), np.uint64, len(encoded))
    return np.frombuffer(b"".join(encoded), np.uint8), lengths


def unpack_strings(text: U8, lengths: npt.NDArray[np.int64]) -> list[str]:
    """Unpack the strings of a table.

    Raises:
        ValueError: The lengths do not add up to the length of the text, or the text is not UTF-8.
    """
    if len(lengths) and int(lengths.max()) > len(text):
        raise ValueError(f"a string is longer than the text of {len(text)} bytes")
    if int(lengths.sum()) != len(text):
        raise ValueError(f"the strings have {int(lengths.sum())} bytes and the text has {len(text)}")
    return split_text(text.tobytes(), lengths)


def split_text(data: bytes, lengths: npt.NDArray[np.int64]) -> list[str]:
    """Split UTF-8 text into strings of the given lengths in bytes. Raises ValueError if a string is not UTF-8."""
    ends = np.cumsum(lengths)
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    if data.isascii():
        text = data.decode("ascii")
        return [text[start:end] for start, end in pairs]
    return [decode_text(data[start:end]) for start, end in pairs]
