"""Ids of hosts: each host's place of a run has a file with an id, and one with the ids of all hosts of the current job.

By these a process without other ranks, such as a promoter, knows which hosts are gone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable

from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError

__all__ = ["host_id", "hosts_of_job", "note_hosts"]

_HOST_FILE = ".dcp-host"
_HOSTS_FILE = ".dcp-hosts.json"


def host_id(place: Store) -> str:
    """Return the id of this host's place, 16 hexadecimal digits; it is made if it is missing.

    Raises:
        OSError: The storage failed.
    """
    try:
        return str(json.loads(place.read(_HOST_FILE))["host"])
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError):
        made = secrets.token_hex(8)
        place.make()
        place.publish(_HOST_FILE, json.dumps({"host": made}).encode())
        return made


def note_hosts(place: Store, ids: Iterable[str]) -> None:
    """Write the ids of all hosts of the job that runs now into this host's place. Raises OSError."""
    place.publish(_HOSTS_FILE, json.dumps({"hosts": sorted(ids)}).encode(), sync=False)


def hosts_of_job(place: Store) -> frozenset[str] | None:
    """Return the ids of the hosts of the last job that noted them in this host's place; None if there is no note."""
    try:
        return frozenset(map(str, json.loads(place.read(_HOSTS_FILE))["hosts"]))
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError):
        return None
