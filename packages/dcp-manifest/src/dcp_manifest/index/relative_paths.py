"""Check of the names of data files: they must stay inside the checkpoint's folder."""

from __future__ import annotations

from dcp_manifest.errors import UnsafeCheckpointError

__all__ = ["check_relative_path"]


def check_relative_path(path: str, *, file: str) -> None:
    r"""Make sure that joining `path` to the checkpoint's folder stays inside of it, on any system.

    Args:
        path: Parts with `/` between; no part may be empty, `.` or `..`, nor contain `\`, NUL or a drive's `:`.
        file: The index that names it, for messages.

    Raises:
        UnsafeCheckpointError: It may lead elsewhere.
    """
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\\" in path or "\0" in path or parts[0][1:2] == ":":
        raise UnsafeCheckpointError(
            f"{file} names the data file {path!r}, which is not a plain path inside the checkpoint's folder; nothing "
            "is read from it: restore the index from a copy you trust"
        )
