"""Stub head of a `.metadata` that stock cannot read: a pickle that raises an error message when it is loaded."""

from __future__ import annotations

from dcp_manifest.pickles.opcodes import PickleWriter, global_, text

__all__ = ["is_stub", "stub_head"]

_START = b"\x80\x04" + text("dcp-manifest stub") + b"0"


def is_stub(data: bytes | memoryview) -> bool:
    """Whether a `.metadata` file begins with a stub head: a pickle that fails when stock loads it."""
    return bytes(data[: len(_START)]) == _START


def stub_head(reason: str) -> bytes:
    """Return a pickle that raises RuntimeError when loaded; the message names the writer, the reason and the remedy.

    Args:
        reason: Why stock cannot read the index: the rest of a sentence after "because".
    """
    sentence = (
        "this checkpoint was written by dcp (dcp-manifest) and torch.distributed.checkpoint cannot load it, because "
        f"{reason}; load it with dcp_all.load (pip install dcp-all), or save it again there with layout='torch' and "
        "interop=True"
    )
    # A failed future is the shortest way to raise a chosen message inside any unpickler.
    futures = "concurrent.futures"
    writer = PickleWriter(_START)
    future = writer.prepare(global_(futures, "Future") + b")R")
    error = writer.prepare(global_("builtins", "RuntimeError") + text(sentence) + b"\x85R")
    writer.put(global_(futures, "Future.set_exception") + future + error + b"\x86R0")
    writer.put(global_(futures, "Future.result") + future + b"\x85R")
    return writer.getvalue()
