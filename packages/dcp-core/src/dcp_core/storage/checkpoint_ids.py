"""Checkpoint ids that are relative paths: resolved in the working folder at the time when they are given.

Not here: choosing the storage for an id (`plugins`), and a storage's own use of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_core.errors import CheckpointNotFoundError
from dcp_core.records.protocols import CheckpointId
from dcp_manifest.schemes import PATH_SCHEMES

__all__ = ["absolute_id", "absolute_id_for"]


def absolute_id(checkpoint_id: CheckpointId) -> CheckpointId:
    """Make a relative local path absolute, `file://` and `local://` URIs included; other ids stay as they are.

    Args:
        checkpoint_id: Path or URI. `~` is an ordinary name in a path; in a URI the storage may expand it.

    Returns:
        The given object if it is not a relative path, a `Path` for a `Path`, text otherwise.

    Raises:
        CheckpointNotFoundError: The path is relative, and the working folder has been removed.
    """
    text = os.fspath(checkpoint_id)
    scheme, separator, path = text.rpartition("://")
    local = not separator or scheme.rpartition("::")[2].lower() in PATH_SCHEMES
    if not local or os.path.isabs(path) or (separator and path.startswith("~")):
        return checkpoint_id
    try:
        absolute = f"{scheme}{separator}{os.path.abspath(path)}"
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{text!r} is relative to a working folder that has been removed; give an absolute path"
        ) from error
    return Path(absolute) if isinstance(checkpoint_id, Path) else absolute


def absolute_id_for(storage: Any, checkpoint_id: CheckpointId | None) -> CheckpointId | None:
    """Return the checkpoint id for a save or load that runs later, or in another process.

    Args:
        storage: Reader or writer that gets the id; None if the id's scheme chooses one. An id without a scheme is a
            path if the storage's attribute `ids_are_paths` is true or, for a storage without this attribute, if its
            attribute `path` is a `Path`, as in stock; ids of other storages are names, and returned unchanged.
        checkpoint_id: Checkpoint id; None for the storage's own id.

    Returns:
        The id; None if there is none.

    Raises:
        CheckpointNotFoundError: See `absolute_id`.
    """
    if checkpoint_id is None:
        shown = getattr(storage, "checkpoint_id", None)
        return getattr(storage, "absolute_id", shown)
    if storage is None or getattr(storage, "ids_are_paths", isinstance(getattr(storage, "path", None), Path)):
        return absolute_id(checkpoint_id)
    return checkpoint_id
