"""Conversion of checkpoint ids that are relative paths into absolute paths.

Not in this module: the choice of the storage for a checkpoint id (`storage_choice`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_core.errors import CheckpointNotFoundError
from dcp_core.records.protocols import CheckpointId
from dcp_manifest.schemes import PATH_SCHEMES, file_path

__all__ = ["absolute_id", "absolute_id_for"]


def absolute_id(checkpoint_id: CheckpointId) -> CheckpointId:
    """Return a checkpoint id with an absolute path, also for `file://` and `local://` URIs; other ids are unchanged.

    Args:
        checkpoint_id: Path or URI. In a path, `~` is an ordinary name; a URI whose path begins with `~` is unchanged.
            So is an empty path, which would else become the working folder.

    Returns:
        `checkpoint_id` itself if it is not a relative path; otherwise a `Path` for a `Path`, or a str.

    Raises:
        CheckpointNotFoundError: The path is relative, and the working folder has been removed.
        InvalidPlaceError: The path looks like a URI that lost a slash.
    """
    text = os.fspath(checkpoint_id)
    scheme, separator, path = text.rpartition("://")
    local = not separator or scheme.rpartition("::")[2].lower() in PATH_SCHEMES
    if not local or not path or os.path.isabs(path) or (separator and path.startswith("~")):
        return checkpoint_id
    file_path(path)  # here, since an absolute path no longer shows that it was to be a URI
    try:
        absolute = f"{scheme}{separator}{os.path.abspath(path)}"
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{text!r} is relative to a working folder that has been removed; give an absolute path"
        ) from error
    return Path(absolute) if isinstance(checkpoint_id, Path) else absolute


def absolute_id_for(storage: Any, checkpoint_id: CheckpointId | None) -> CheckpointId | None:
    """Return the checkpoint id for a save or load that runs later or in another process: relative paths made absolute.

    An id without a URI scheme is a path if `storage` is None or has a true attribute `ids_are_paths`. For a storage
    without the attribute `ids_are_paths`, such as one of stock, the id is a path if the storage's attribute `path` is a
    `pathlib.Path`. In all other cases the id is a name, which is returned unchanged.

    Args:
        storage: Storage reader or writer that will use the id; None if the URI scheme will select the storage.
        checkpoint_id: Checkpoint id; None for the id with which `storage` was created.

    Returns:
        The checkpoint id; None if `checkpoint_id` is None and `storage` is None or has no id.

    Raises:
        CheckpointNotFoundError: The path is relative, and the working folder has been removed.
        InvalidPlaceError: The path looks like a URI that lost a slash.
    """
    if checkpoint_id is None:
        shown = getattr(storage, "checkpoint_id", None)
        return getattr(storage, "absolute_id", shown)
    if storage is None or getattr(storage, "ids_are_paths", isinstance(getattr(storage, "path", None), Path)):
        return absolute_id(checkpoint_id)
    return checkpoint_id
