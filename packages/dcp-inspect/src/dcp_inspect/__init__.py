"""The `dcp` command: look at checkpoints, verify, compare, convert, plan and remove them.

The commands are in `dcp_inspect.commands`, one module each; what they share is beside this file.
"""

from dcp_inspect.cli import main, run

__all__ = ["main", "run"]
