"""Checkpoints on a small HTTP object server: an example of a storage that somebody else brings.

Once installed, `dcp_core.save(state, checkpoint_id="http+dcp://host:port/folder")` finds it by its entry point.
"""

from dcp_http_example.reader import HttpReader
from dcp_http_example.store import HttpStore
from dcp_http_example.writer import HttpWriter

__all__ = ["HttpReader", "HttpStore", "HttpWriter"]
