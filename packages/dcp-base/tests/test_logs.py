from __future__ import annotations

import logging
from typing import Any

import pytest

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger

HOSTILE = "a\x1b[31m\nrank 0: saved\u202e\udc80"
SHOWN = r"a\x1b[31m\nrank 0: saved\u202e\udc80"
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "text": (HOSTILE, SHOWN),
    "error": (OSError(5, "failed", HOSTILE), rf"[Errno 5] failed: {HOSTILE!r}"),
    "error-of-text": (ValueError(HOSTILE), SHOWN.replace(r"\n", "\n")),
    "own-error": (DcpError(HOSTILE), SHOWN.replace(r"\n", "\n")),
    "number": (7, "7"),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_records_are_safe_for_terminals(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    value, shown = ARGUMENTS[kind]
    with caplog.at_level(logging.DEBUG, "dcp_base.tests"):
        library_logger("dcp_base.tests").warning("step %d: %s", 3, value)
    assert caplog.messages == [f"step 3: {shown}"]


def test_a_logger_is_made_safe_once() -> None:
    assert library_logger("dcp_base.tests") is library_logger("dcp_base.tests")
    assert len(library_logger("dcp_base.tests").filters) == 1
