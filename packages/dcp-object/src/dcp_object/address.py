"""Parsing of object store URIs (`s3://bucket/folder`, …) into container and folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from dcp_base.errors import InvalidPlaceError
from dcp_base.schemes import OBJECT_STORE_SCHEMES, WEB_SCHEMES
from dcp_io import check_name

SCHEMES = (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES)
# Of these the container is the part before the first slash; of the others the client reads the whole URI.
_BUCKETS = ("s3", "s3a", "gs", *WEB_SCHEMES)
_FORM = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]+)(?:/(.*?))?/*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    """A folder in a container (bucket) of an object store."""

    root: str
    """URI of the container, to which keys are relative."""
    folder: str = ""
    """Prefix of the keys of its objects, without leading and trailing slash."""

    @property
    def url(self) -> str:
        """URI of the folder, such as `s3://bucket/folder`."""
        return f"{self.root}/{self.folder}" if self.folder else self.root

    def key(self, name: str) -> str:
        """Return an object's key."""
        return f"{self.folder}/{name}" if self.folder else name

    def child(self, name: str) -> Address:
        """Return the address of a subfolder."""
        return replace(self, folder=self.key(check_name(name)))


def is_address(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether an id has the scheme of an object store."""
    return os.fspath(checkpoint_id).partition("://")[0].lower() in SCHEMES


def parse_address(checkpoint_id: str | os.PathLike[str]) -> Address:
    """Parse a checkpoint id into container and folder.

    Raises:
        InvalidPlaceError: The id does not have the form `scheme://container/folder`, or contains credentials or
            parameters, which would appear in logs and in the checkpoint.
        UnsafeCheckpointError: The folder's path contains `..` or another unsafe component.
    """
    text = os.fspath(checkpoint_id)
    found = _FORM.fullmatch(text)
    if found is None or found[1].lower() not in SCHEMES:
        form = f"scheme://container/folder with one of {', '.join(SCHEMES)}"
        raise InvalidPlaceError(f"{text!r} is not of the form {form}")
    scheme, container, folder = found[1].lower(), found[2], found[3] or ""
    named_account = scheme in ("abfs", "abfss") and ":" not in container
    if ("@" in container and not named_account) or "?" in text:
        raise InvalidPlaceError(
            f"a {scheme}:// id must hold neither credentials nor parameters; pass them as storage_options, or by the "
            "environment"
        )
    if folder:
        check_name(folder)
    if scheme in _BUCKETS:
        return Address(f"{scheme}://{container}", folder)
    return Address(f"{scheme}://{container}/{folder}".rstrip("/"))
