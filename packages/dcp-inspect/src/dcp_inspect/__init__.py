"""The `dcp` command: look at checkpoints, verify, compare, convert, plan and remove them; progress bars and pictures.

The commands are in `dcp_inspect.commands`, one module each; shared code is in this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_inspect.cli import main, run
    from dcp_inspect.visuals.progress_bar import show_progress
    from dcp_inspect.visuals.visualization import Picture, visualize

__all__ = ["Picture", "main", "run", "show_progress", "visualize"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_inspect.cli": ("main", "run"),
        "dcp_inspect.visuals.progress_bar": ("show_progress",),
        "dcp_inspect.visuals.visualization": ("Picture", "visualize"),
    },
)
