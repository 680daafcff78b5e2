"""The `dcp` command: look at checkpoints, verify, compare, convert, plan and remove them.

The commands are in `dcp_inspect.commands`, one module each; shared code is in this folder.
"""

from dcp_inspect.cli import main, run

__all__ = ["main", "run"]
