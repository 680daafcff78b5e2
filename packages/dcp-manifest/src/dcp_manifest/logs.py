"""Loggers of these packages: names in log records are safe for terminals. Handlers are the application's."""

from __future__ import annotations

import logging
from typing import Any

from dcp_manifest.printable import printable

__all__ = ["library_logger"]


def library_logger(name: str) -> logging.Logger:
    """Return the logger of that name; strings and errors among a record's arguments are escaped by `printable`.

    Paths, identifiers of checkpoints and texts of foreign errors may hold what a terminal would obey, or a line break
    that looks like another record.
    """
    logger = logging.getLogger(name)
    if _escape not in logger.filters:
        logger.addFilter(_escape)
    return logger


def _escape(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_printable, record.args))
    return True


def _printable(value: Any) -> Any:
    if isinstance(value, BaseException):
        return printable(str(value), keep="\n\t")
    return printable(value) if isinstance(value, str) else value
