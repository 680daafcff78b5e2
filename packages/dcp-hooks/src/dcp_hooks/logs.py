"""The logger of this package. Its records quote what they show of names (`%r`); handlers are the application's."""

import logging

__all__ = ["logger"]

logger = logging.getLogger("dcp_hooks")
