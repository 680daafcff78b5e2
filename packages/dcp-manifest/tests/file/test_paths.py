from __future__ import annotations

import numpy as np
import pytest

from dcp_manifest import UnsupportedFormatError, read_index
from dcp_manifest.file.blob import Blob, pack
from dcp_manifest.file.manifest_read import IndexFile, ManifestReader
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.literal_keys import LiteralKey

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


@pytest.fixture
def with_paths(make_index):
    """An index of objects with these names and paths."""

    def make(names, paths):
        rows = [(0, 0, 0, 1, 0, 2, 0, None)] * len(names)
        return make_index(objects=[(name, 0) for name in names], object_rows=rows, paths=paths, files=("a",))

    return make


@pytest.mark.parametrize(("paths", "elements", "lengths", "kinds", "texts"), CASES.values(), ids=CASES)
def test_paths_as_columns(with_paths, paths, elements, lengths, kinds, texts):
    data = encode(with_paths(list(paths), paths))
    reader = ManifestReader(IndexFile(data, file="f").blob)
    assert "path.name.bytes" not in reader.columns
    assert reader.column("path.elements").tolist() == elements
    assert reader.column("path.element_bytes").tolist() == lengths
    assert reader.column("path.kind").tolist() == kinds
    assert (reader.column("path.text") if "path.text.bytes" in reader.columns else None) == texts
    back = read_index(data, file="f").paths
    assert back == paths
    assert [[type(part) for part in path] for path in back.values()] == [
        [type(part) for part in path] for path in paths.values()
    ]


def test_names_without_a_path(with_paths):
    index = with_paths(["a", "b"], {"b": ("b",)})
    assert read_index(encode(index), file="f").paths == {"b": ("b",)}


@pytest.mark.parametrize(
    ("name", "lengths", "kinds"),
    [("ab", [1], [0, 0]), ("a.b", [3], [0, 0]), ("a.b", [0], [0, 0]), ("a.b", [1], [0, 1]), ("a.b", [1], [0, 4])],
)
def test_columns_that_do_not_fit_are_refused(name, lengths, kinds):
    columns = {"path.elements": [2], "path.element_bytes": lengths, "path.kind": kinds}
    rows = {"path": 1, "separator": 1, "element": 2}
    columns = {key: np.array(values, np.uint8) for key, values in columns.items()}
    manifest = pack(columns, {"rows": rows, "stored": []})[0]
    with pytest.raises(ValueError, match="path"):
        ManifestReader(Blob(memoryview(manifest), file="f")).paths([name])


@pytest.mark.parametrize("part", [1.5, None, True, b"x", 10**18])
def test_only_strings_and_small_ints(with_paths, part):
    with pytest.raises(UnsupportedFormatError, match="path"):
        encode(with_paths(["a"], {"a": (part,)}))
