"""Storage writers of another library's making, importable by the worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_fs import FileSystemWriter

__all__ = ["EnvironmentWriter", "StockStyleWriter"]


class StockStyleWriter(FileSystemWriter):
    """Keeps a relative path as it is, and goes by the working folder when it writes."""

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(None if checkpoint_id is None else Path(os.path.relpath(checkpoint_id)))


class EnvironmentWriter(FileSystemWriter):
    """Notes what it sees of the environment."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        Path(self.path, "seen").write_text(str(os.environ.get("DCP_TEST_SECRET")))
