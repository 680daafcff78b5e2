"""Checkpoints on a small HTTP object server: an example of a storage that somebody else brings.

Once installed, `dcp_core.save(state, checkpoint_id="http+dcp://host:port/folder")` finds it by its entry point. Names
are imported when they are first used, so that looking for plug-ins does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_http_example.reader import HttpReader
    from dcp_http_example.store import HttpStore
    from dcp_http_example.writer import HttpWriter

__all__ = ["HttpReader", "HttpStore", "HttpWriter"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_http_example.reader": ("HttpReader",),
        "dcp_http_example.store": ("HttpStore",),
        "dcp_http_example.writer": ("HttpWriter",),
    },
)
