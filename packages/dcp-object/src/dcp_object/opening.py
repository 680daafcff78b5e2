"""`open_store`: opens a folder in an object store; this package's plug-in registers it. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_hooks import WEB_SCHEMES
from dcp_object.address import parse_address
from dcp_object.client import connect
from dcp_object.options import Options
from dcp_object.store import PART_BYTES, UPLOADS, ObjectStore
from dcp_object.web_folder import WebFolder

__all__ = ["open_store"]


def open_store(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    uploads: int = UPLOADS,
    spread: int = 0,
) -> ObjectStore:
    """Open the store of a folder in an object store; no request is sent.

    Args:
        uri: URI of the folder: `s3://bucket/folder`, `gs://…`, `az://…`, `abfs://…`; or `https://host/folder`,
            read-only.
        storage_options: Configuration of obstore: options of the service under obstore's names (`endpoint`, `region`,
            `access_key_id`, …), and the groups `client_options`, `retry_config` and `credential_provider`. obstore
            takes missing options from the environment and the machine's identity. None gives no options. Never logged.
        part_bytes: Size of the parts of large uploads, bytes.
        uploads: Number of parts of one object that are uploaded at the same time.
        spread: Number of key prefixes, at most 256, over which new objects are distributed; 0 for none.

    Raises:
        ValueError: The URI or the options are not valid.
    """
    address = parse_address(uri)
    scheme = address.root.partition("://")[0]
    client = connect(address.root, Options.of(storage_options, plain_http=scheme == "http"))
    kind = WebFolder if scheme in WEB_SCHEMES else ObjectStore
    return kind(client, address, part_bytes=part_bytes, uploads=uploads, spread=spread)
