"""The folder of `acme://team/run`, below the vault that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dcp_io import LocalStore
from dcp_manifest import UnsafeCheckpointError

__all__ = ["VAULT_VARIABLE", "folder_of", "is_address", "open_store"]

VAULT_VARIABLE = "ACME_VAULT"
_SCHEME = "acme://"


def is_address(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id belongs to this storage."""
    return os.fspath(checkpoint_id).lower().startswith(_SCHEME)


def folder_of(checkpoint_id: str | os.PathLike[str]) -> Path:
    """The folder of an id.

    Raises:
        ValueError: The id is of another storage, or the environment has no vault.
        UnsafeCheckpointError: The id leads out of the vault.
    """
    text = os.fspath(checkpoint_id)
    if not is_address(text):
        raise ValueError(f"{text!r} is not of the form {_SCHEME}team/run")
    root = os.environ.get(VAULT_VARIABLE)
    if not root:
        raise ValueError(
            f"{text}: set {VAULT_VARIABLE} to the folder that holds the vault"
        )
    place = PurePosixPath(text[len(_SCHEME) :])
    if place.is_absolute() or ".." in place.parts:
        raise UnsafeCheckpointError(f"{text} leads out of the vault")
    return Path(root) / place


def open_store(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> LocalStore:
    """The store of an id, for tools without PyTorch. There are no options."""
    if storage_options:
        raise ValueError(
            f"{os.fspath(uri)}: the vault has no options: {sorted(storage_options)}"
        )
    return LocalStore(folder_of(uri))
