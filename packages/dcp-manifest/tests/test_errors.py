from __future__ import annotations

import pytest

from dcp_base import DcpError
from dcp_manifest import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (CheckpointNotFoundError, FileNotFoundError),
        (CorruptCheckpointError, ValueError),
        (UnsupportedFormatError, ValueError),
        (UnsafeCheckpointError, ValueError),
    ],
)
def test_each_is_ours_and_the_fitting_builtin(error, builtin):
    assert issubclass(error, DcpError)
    assert issubclass(error, builtin)


def test_what_is_known_of_the_place_is_named():
    error = CorruptCheckpointError("it is damaged", file="a", key="k", offset=3)
    assert str(error) == "it is damaged (file 'a', key 'k', offset 3)"
    assert (error.file, error.key, error.offset) == ("a", "k", 3)
    assert str(CorruptCheckpointError("it is damaged")) == "it is damaged"
