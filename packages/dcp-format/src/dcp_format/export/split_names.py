"""Names of the tensors into which stacked tensors are split, such as the experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcp_core.errors import UnsupportedValueError

__all__ = ["SplitNames"]


class SplitNames:
    """Names of the slices of stacked tensors along their first dimension.

    Args:
        split: Pattern of the name of a stacked tensor in the files → pattern of the names of its slices. `*` in a
            pattern is one part of the name between dots, the same in both; `{}` is the number of the slice.

    Raises:
        ValueError: A pattern of names of slices lacks `{}`, or has another number of `*` than that of the tensor.
    """

    def __init__(self, split: Mapping[str, str]) -> None:
        self._rules: list[tuple[str, re.Pattern[str], str]] = []
        for pattern, names in split.items():
            if names.count("{}") != 1 or names.count("*") != pattern.count("*"):
                raise ValueError(
                    f"split={{{pattern!r}: {names!r}}}: the names of the slices need one {{}} for their number, and as "
                    "many * as the pattern of the tensor"
                )
            self._rules.append((pattern, re.compile(r"([^.]+)".join(map(re.escape, pattern.split("*")))), names))
        self._used: set[str] = set()

    def of(self, name: str, count: int | None) -> tuple[str, ...]:
        """Return the names of the `count` slices of a tensor; empty if the tensor stays whole.

        Raises:
            UnsupportedValueError: The tensor is to be split, and has no dimensions (`count` is None).
        """
        for pattern, expression, names in self._rules:
            found = expression.fullmatch(name)
            if found is not None:
                if count is None:
                    raise UnsupportedValueError(f"split: {name!r} is one number, without slices: change {pattern!r}")
                self._used.add(pattern)
                parts = iter(found.groups())
                template = re.sub(r"\*", lambda _, parts=parts: next(parts), names)  # type: ignore[misc]
                return tuple(template.replace("{}", str(number)) for number in range(count))
        return ()

    @property
    def unused(self) -> list[str]:
        """Patterns that no tensor had."""
        return [pattern for pattern, _, _ in self._rules if pattern not in self._used]
