"""Recognition of network file systems, by the mount that a folder lies in.

Source: Linux `proc_pid_mountinfo(5)`.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_network_folder"]

_MOUNTS = Path("/proc/self/mountinfo")
# Types of file systems whose bytes come over a network. A FUSE file system counts if its name is one of these.
_NETWORK = {
    *(
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
    ),
    *(
        "panfs",
        "smb3",
        "smbfs",
        "virtiofs",
        "weka",
        "wekafs",
        "gcsfuse",
        "goofys",
        "juicefs",
        "rclone",
        "s3fs",
        "sshfs",
    ),
    *("blobfuse2", "mountpoint-s3"),
}


def is_network_folder(path: str) -> bool:
    """Return whether a folder lies in a network file system; False if the system does not list its mounts.

    Args:
        path: Absolute path; the folder need not exist.
    """
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    found, longest = "", -1
    real = os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.partition(" ")[0]
        if len(fields) > 4 and _contains(mount := _unescaped(fields[4]), real) and len(mount) >= longest:
            found, longest = kind, len(mount)  # of two mounts on one folder, the later one hides the other
    return found.removeprefix("fuse.").lower() in _NETWORK


def _contains(mount: str, path: str) -> bool:
    return mount == "/" or path == mount or path.startswith(mount + "/")


def _unescaped(text: str) -> str:
    """Return a path in which the file writes spaces, tabs, line breaks and backslashes as octal numbers."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
