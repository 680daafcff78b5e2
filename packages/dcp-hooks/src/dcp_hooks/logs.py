"""The logger of `dcp_hooks`. Log messages show names quoted (`%r`); the application configures handlers."""

import logging

__all__ = ["logger"]

logger = logging.getLogger("dcp_hooks")
