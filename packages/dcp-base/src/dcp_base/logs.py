"""Loggers of these packages, which escape control characters. The application sets up handlers."""

from __future__ import annotations

import logging
from typing import Any

from dcp_base.escaping import printable


def library_logger(name: str) -> logging.Logger:
    """Return the logger `name`, which escapes strings and errors in the arguments of log records by `printable`.

    They may contain control sequences of terminals, or line breaks that fake another record.
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


logger = library_logger("dcp_base")
