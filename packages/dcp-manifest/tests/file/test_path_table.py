from __future__ import annotations

import numpy as np
import pytest

from dcp_manifest import LiteralKey
from dcp_manifest.file.path_table import PathColumns, pack_paths, unpack_paths

CASES = {
    "flat": ({"a": ("a",), "b.c": ("b.c",)}, [1, 1], [], [0, 0], None),
    "nested": ({"a.b.c": ("a", "b.c"), "d": ("d",)}, [2, 1], [1], [0, 0, 0], None),
    "lists and numbers": ({"l.0.5": ("l", 0, LiteralKey(5))}, [3], [1, 1], [0, 1, 2], None),
    "other literals": ({"s.(1, None)": ("s", LiteralKey("(1, None)"))}, [2], [1], [0, 3], None),
    "not ascii": ({"ä.ö": ("ä", "ö")}, [2], [2], [0, 0], None),
    "empty keys": ({".": ("", "")}, [2], [0], [0, 0], None),
    "other text": ({"x": ("y", "z")}, [2], [1], [0, 0], ["y.z"]),
    "large": ({f"k.{10**17}": ("k", 10**17)}, [2], [1], [0, 1], None),
}


@pytest.mark.parametrize(("paths", "elements", "lengths", "kinds", "texts"), CASES.values(), ids=CASES)
def test_paths_as_columns(paths, elements, lengths, kinds, texts):
    packed = pack_paths(list(paths), paths)
    assert packed.elements.tolist() == elements
    assert packed.element_bytes.tolist() == lengths
    assert packed.kinds.tolist() == kinds
    assert packed.texts == texts
    back = unpack_paths(list(paths), packed)
    assert back == paths
    assert [[type(part) for part in path] for path in back.values()] == [
        [type(part) for part in path] for path in paths.values()
    ]


def test_names_without_a_path():
    packed = pack_paths(["a", "b"], {"b": ("b",)})
    assert unpack_paths(["a", "b"], packed) == {"b": ("b",)}


@pytest.mark.parametrize(
    ("name", "lengths", "kinds"),
    [("ab", [1], [0, 0]), ("a.b", [3], [0, 0]), ("a.b", [0], [0, 0]), ("a.b", [1], [0, 1]), ("a.b", [1], [0, 4])],
)
def test_columns_that_do_not_fit_are_refused(name, lengths, kinds):
    columns = PathColumns(np.array([2]), np.array(lengths), np.array(kinds), None)
    with pytest.raises(ValueError, match="path"):
        unpack_paths([name], columns)


@pytest.mark.parametrize("part", [1.5, None, True, b"x", 10**18])
def test_only_strings_and_small_ints(part):
    with pytest.raises(ValueError, match="path"):
        pack_paths(["a"], {"a": (part,)})
