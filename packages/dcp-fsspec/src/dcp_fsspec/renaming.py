"""Replacement of a file by a rename, with a check that the file was replaced.

File systems rename differently: some report a failed rename only by a return value, which their fsspec package
ignores.
"""

from __future__ import annotations

from typing import Any

from dcp_fsspec.kinds import is_local, renames_by_options
from dcp_fsspec.requests import repeated
from dcp_io import StorageError

__all__ = ["replace_file"]


def replace_file(fs: Any, temporary: str, path: str, content: bytes, place: str) -> None:
    """Replace a file by renaming a temporary file; the replacement is complete on return.

    Args:
        fs: File system of the kind `files`, in which incomplete files are visible.
        temporary: Path of the file that holds `content`.
        path: Path of the file to replace.
        content: Contents of the temporary file, which `path` must have after the rename.
        place: URI of `path`, for error messages.

    Raises:
        StorageError: The file system failed, or did not replace the file.
    """
    repeated(f"rename {temporary}", lambda: _rename(fs, temporary, path), attempts=1)
    if is_local(fs):  # the kernel's answer can be trusted
        return
    fs.invalidate_cache(temporary.rpartition("/")[0])
    fs.invalidate_cache(path)
    if fs.exists(temporary) or _read(fs, path) != content:
        raise StorageError(
            f"the file system did not replace {place} by what was renamed to it; nothing else was removed: save to "
            "another storage"
        )


def _rename(fs: Any, temporary: str, path: str) -> None:
    if renames_by_options(fs):
        options = {"destination": path, "renameoptions": "OVERWRITE"}
        fs._call("RENAME", method="put", path=temporary, **options)  # noqa: SLF001 - its `mv` takes no options
    else:
        fs.mv(temporary, path)


def _read(fs: Any, path: str) -> bytes | None:
    try:
        return bytes(repeated(f"GET {path}", lambda: fs.cat_file(path)))
    except FileNotFoundError:
        return None
