"""The command says what the transcript says."""

from __future__ import annotations

from integration_tests.command.transcript import PATH, record


def test_transcript() -> None:
    transcript = record()
    assert "Traceback" not in transcript
    assert transcript == PATH.read_text(encoding="utf-8")
