"""Name, version and descriptor of a transform of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Versioned"]


class Versioned:
    """Base of transforms with one version, whose default settings decode the output of all settings."""

    name: ClassVar[str]
    version: ClassVar[str] = "1"

    @classmethod
    def registry_name(cls) -> str:
        """Return the registry name."""
        return cls.name

    @classmethod
    def from_descriptor(cls, version: str) -> Self:
        """Return the transform that decodes a descriptor's version. Raises ValueError for unknown versions."""
        if version.partition(".")[0] != cls.version:
            raise ValueError(f"version {version!r}; version {cls.version} is known")
        return cls()

    def get_descriptor(self) -> str:
        """Return the descriptor, `name/version`."""
        return f"{self.name}/{self.version}"
