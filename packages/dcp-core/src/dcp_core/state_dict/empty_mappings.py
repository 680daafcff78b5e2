"""Empty mappings of a state dict: they hold no value, so their paths are recorded under names that no value has.

Stock drops them. The name is the joined path and one dot more, or more dots where that is another value's name
(`{"a": {}}` beside `{"a": {"": 1}}`); it is recognised by being longer than its path.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from dcp_core.state_dict.flatten import FlatState, Path, get_element, set_element

__all__ = ["is_empty_mapping", "merge_paths", "name_empty_mappings", "restore_empty_mappings"]


def name_empty_mappings(flat: FlatState) -> dict[str, Path]:
    """Name the empty mappings of a flattened state dict, so that their paths can be kept beside those of the values."""
    named: dict[str, Path] = {}
    for path in flat.empty:
        named[_free_name(path, flat.values, named)] = path
    return named


def is_empty_mapping(name: str, path: Path) -> bool:
    """Whether a recorded name and path stand for an empty mapping."""
    if not name.endswith("."):
        return False
    joined = ".".join(map(str, path))
    return len(name) > len(joined) and name == joined.ljust(len(name), ".")


def merge_paths(parts: Iterable[Mapping[str, Path]]) -> dict[str, Path]:
    """Merge the recorded paths of several ranks; the first one of a value stays.

    An empty mapping whose name is another rank's value, or empty mapping elsewhere, is renamed.
    """
    merged: dict[str, Path] = {}
    displaced: dict[Path, None] = {}
    for part in parts:
        for name, path in part.items():
            kept = merged.setdefault(name, path)
            if kept is path or kept == path:
                continue
            if is_empty_mapping(name, path):
                displaced[path] = None
            elif is_empty_mapping(name, kept):
                displaced[kept] = None
                merged[name] = path
    for path in displaced:
        merged[_free_name(path, merged)] = path
    return merged


def restore_empty_mappings(
    nested: dict[Any, Any], paths: Mapping[str, Path], *, include: Callable[[str, Path], bool] | None = None
) -> None:
    """Put an empty dict at each recorded path of one that has nothing there yet.

    Args:
        nested: The unflattened state dict; changed.
        paths: Name → path of values and empty mappings.
        include: Which of the empty mappings are wanted; None takes all.
    """
    for name, path in paths.items():
        wanted = is_empty_mapping(name, path) and (include is None or include(name, path))
        if wanted and get_element(nested, path) is None:
            set_element(nested, path, {})


def _free_name(path: Path, *taken: Container[str]) -> str:
    name = ".".join(map(str, path)) + "."
    while any(name in names for names in taken):
        name += "."
    return name
