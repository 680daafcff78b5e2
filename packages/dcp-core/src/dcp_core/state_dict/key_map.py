"""Renaming map: names of a template ↔ names in a checkpoint, where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KeyMap"]


class KeyMap:
    """Maps the names of a template's values to their names in the checkpoint.

    Args:
        rename: Name or path in the template → name or path in the checkpoint. A path stands for everything under it:
            `{"model.encoder": "encoder"}`; the longest matching path applies.
        patterns: (regular expression, replacement) pairs as of `re.sub`, applied one after another to the names that
            `rename` leaves as they are.

    Raises:
        ValueError: A pattern is no regular expression, or its replacement does not fit it.
    """

    def __init__(
        self, rename: Mapping[str, str] | None = None, patterns: Sequence[tuple[str | re.Pattern[str], str]] = ()
    ) -> None:
        self._rename = dict(rename or {})
        self._patterns = []
        for pattern, replacement in patterns:
            try:
                compiled = re.compile(pattern)
                compiled.sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ValueError(f"rename_regex: {pattern!r} → {replacement!r}: {error}") from error
            self._patterns.append((compiled, replacement))

    def __bool__(self) -> bool:
        return bool(self._rename or self._patterns)

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint."""
        path = name
        while path:
            if path in self._rename:
                return self._rename[path] + name[len(path) :]
            path = path.rpartition(".")[0]
        for pattern, replacement in self._patterns:
            name = pattern.sub(replacement, name)
        return name

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the keys of `rename` that match none of these names of a template."""
        paths = set()
        for name in names:
            while name:
                paths.add(name)
                name = name.rpartition(".")[0]
        return [path for path in self._rename if path not in paths]
