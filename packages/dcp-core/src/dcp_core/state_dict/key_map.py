"""Renaming of keys in a load: mapping of keys in the template to keys in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KeyMap"]


class KeyMap:
    """Mapping of keys in a template to keys in the checkpoint, for loads that rename keys.

    Args:
        rename: FQN or prefix in the template → FQN or prefix in the checkpoint. A prefix such as `model.encoder`
            renames all keys under it; the longest matching prefix applies. `{"model": ""}` drops a prefix, and
            `{"": "model"}` adds one to all other keys.
        patterns: Pairs (regular expression, replacement) as for `re.sub`, applied one after another to the keys that
            `rename` does not rename.

    Raises:
        ValueError: A pattern is not a valid regular expression, or its replacement refers to a missing group.
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
        """Return the key in the checkpoint for a key in the template."""
        path = name
        while path:
            new = self._rename.get(path)
            if new:
                return new + name[len(path) :]
            if new == "" and path != name:
                return name[len(path) + 1 :]
            path = path.rpartition(".")[0]
        if self._rename.get(""):
            return f"{self._rename['']}.{name}"
        for pattern, replacement in self._patterns:
            name = pattern.sub(replacement, name)
        return name

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the entries of `rename` that match none of these keys of a template."""
        paths = set()
        for name in names:
            while name:
                paths.add(name)
                name = name.rpartition(".")[0]
        return [path for path in self._rename if path and path not in paths]
