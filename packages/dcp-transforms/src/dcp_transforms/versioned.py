"""Base class of this package's transforms: name, version and descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Versioned:
    """Transform with one format version; decoding does not depend on the encoder's settings."""

    name: ClassVar[str]
    version: ClassVar[str] = "1"

    @classmethod
    def registry_name(cls) -> str:
        """Return the name in the registry and in descriptors."""
        return cls.name

    @classmethod
    def from_descriptor(cls, version: str) -> Self:
        """Return a decoder. Raises ValueError for an unknown version."""
        if version.partition(".")[0] != cls.version:
            raise ValueError(f"version {version!r}; version {cls.version} is known")
        return cls()

    def get_descriptor(self) -> str:
        """Return `name/version` for the index."""
        return f"{self.name}/{self.version}"
