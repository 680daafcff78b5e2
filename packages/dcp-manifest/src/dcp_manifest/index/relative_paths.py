"""Check of the names of data files: paths must stay inside the checkpoint's folder."""

from __future__ import annotations

from dcp_manifest.errors import UnsafeCheckpointError

__all__ = ["check_relative_path"]


def check_relative_path(path: str, *, file: str) -> None:
    r"""Check that a relative path stays inside the checkpoint's folder on any system.

    Args:
        path: Parts separated by `/`; no part may be empty, `.` or `..`, or contain `\`, NUL or a drive's `:`.
        file: Name of the index that contains the path, for messages.

    Raises:
        UnsafeCheckpointError: The path may lead out of the folder.
    """
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\\" in path or "\0" in path or parts[0][1:2] == ":":
        raise UnsafeCheckpointError(
            f"{file} names the data file {path!r}, which is not a plain path inside the checkpoint's folder; nothing "
            "is read from it: restore the index from a copy you trust"
        )
