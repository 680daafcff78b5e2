"""Names that no run of a keeper can have are refused by saves and loads, with one clear error and nothing beside it."""

from __future__ import annotations

import pytest

import dcp_all as dcp
from dcp_manifest import InvalidPlaceError


@pytest.mark.parametrize("run", ["", "..", ".x", "x" * 70, "run 1", "ü", "run\n", "a:b"])
def test_wrong_names_are_refused_without_noise(run: str, caplog: pytest.LogCaptureFixture) -> None:
    for call in (dcp.save, dcp.load):
        with pytest.raises(InvalidPlaceError, match="is not a name for a keeper's run"):
            call({"step": 1}, checkpoint_id=f"keeper://{run}/step-1")
    assert caplog.records == []
