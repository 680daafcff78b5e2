"""The `dcp` command: look at checkpoints, verify, compare, convert, plan and remove them; progress bars and pictures.

Each command is a module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_inspect.cli import run as run
    from dcp_inspect.visuals.progress_bar import show_progress as show_progress
    from dcp_inspect.visuals.visualization import visualize as visualize

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_inspect.cli": ("run",),
        "dcp_inspect.visuals.progress_bar": ("show_progress",),
        "dcp_inspect.visuals.visualization": ("visualize",),
    },
)
