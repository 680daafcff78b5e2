from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dcp_manifest.file.blob import FOOTER_BYTES, Blob, pack, read_footer
from dcp_manifest.file.manifest_read import ManifestReader
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.schema import check_index


@pytest.fixture
def crafted(rich):
    """The rich manifest with some columns or row counts replaced."""
    data = encode(rich)
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")
    blob = Blob(memoryview(data)[footer.manifest_offset : -FOOTER_BYTES], file="f")
    columns = {name: blob.read(name) for name in blob.header.columns}
    del columns["block_crcs"]

    def make(rows=(), info=(), stored=None, **changed):
        changed = {name.replace("__", "."): values for name, values in changed.items()}
        metadata = {
            "rows": {**blob.header.metadata["rows"], **dict(rows)},
            "stored": blob.header.metadata["stored"] if stored is None else stored,
            "info": {**blob.header.metadata["info"], **dict(info)},
        }
        kept = {name: values for name, values in {**columns, **changed}.items() if values is not None}
        return ManifestReader(Blob(memoryview(pack(kept, metadata)[0]), file="f"))

    return make


def test_unchanged_it_is_sound(crafted):
    check_index(crafted().whole())


U8, U64 = np.uint8, np.uint64
CASES = {
    "rows of another type": {"rows": {"tensor": "6"}},
    "negative rows": {"rows": {"tensor": -1}},
    "rows that are true": {"rows": {"tensor": True}},
    "more rows than bytes": {"rows": {"chunk": 10**7}},
    "fewer chunks": {"rows": {"chunk": 6}},
    "missing column": {"chunk__file": None},
    "not a list of tables": {"stored": "chunk"},
    "missing text": {"file__text": None},
    "missing counts": {"tensor__running": None},
    "wide text": {"file__text": np.zeros(3, np.uint16)},
    "wrong length": {"chunk__file": np.zeros(3, U8)},
    "huge offset": {"chunk__offset__0": np.array([2**63] * 6, U64)},
    "huge position": {"chunk__position": np.array([2**63], U64)},
    "huge length": {"chunk__stored_bytes": np.array([2**63], U64)},
    "huge frame": {"frame__trail": np.array([2**62] * 5, U64)},
    "frame row": {"chunk__frame": np.full(7, 200, U8)},
    "file row": {"chunk__file": np.full(7, 2, U8)},
    "many dimensions": {"tensor__ndim": np.full(1, 65, U8)},
    "other dimensions": {"tensor__ndim": np.full(6, 2, U8)},
    "chunks that overflow": {"tensor__chunks": np.array([2**63 - 1, 2**63 - 1, 9, 0, 0, 0], U64)},
    "running that overflow": {"tensor__running": np.array([2**62] * 6, U64)},
    "links that overflow": {"chain__links": np.array([2**40], U64)},
    "elements that overflow": {"path__elements": np.array([2**63 - 1] * 9, U64)},
    "fewer elements": {"path__elements": np.ones(1, U8)},
    "world size": {"info": {"world_size": 0}},
    "kind": {"path__kind": np.full(12, 7, U8)},
    "alias": {"alias__target": np.full(1, 6, U8)},
    "checked": {"chunk__checked": np.full(1, 2, U8)},
    "dtype": {"tensor__dtype": np.full(1, 200, U8)},
    "item bytes": {"chunk__stored_bytes": None, "dtype__item_bytes": np.array([2**60] * 4, U64)},
    "save id": {"info": {"save_id": 5}},
    "generation": {"info": {"generation": True}},
    "rank": {"info": {"rank": "0"}},
    "user": {"info": {"user": [["a"]]}},
}


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_named(crafted, name):
    changes = CASES[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        check_index(crafted(**changes).whole())
    assert str(caught.value)


def test_memory_stays_within_a_factor_of_the_manifest(crafted):
    """As many rows as there are bytes, all columns collapsed, 64 dimensions."""
    boxes = {f"chunk__{what}__{dim}": np.zeros(1, U8) for what in ("offset", "size") for dim in range(64)}
    reader = crafted(
        rows={"tensor": 1, "chunk": 5000},
        tensor__name__text=np.frombuffer(b"t", U8),
        tensor__name__bytes=np.ones(1, U8),
        **{f"tensor__{name}": np.zeros(1, U8) for name in ("dtype", "flags", "owner")},
        tensor__ndim=np.full(1, 64, U8),
        tensor__chunks=np.array([5000], np.uint16),
        tensor__shape=np.ones(1, U8),
        **boxes,
    )
    limit = reader.blob.header.data_start + reader.blob.header.data_bytes
    tracemalloc.start()
    with pytest.raises(ValueError, match="cannot have 320000 offsets"):
        reader.whole()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 * limit


def test_a_dtype_that_is_not_known_still_has_its_size(crafted):
    """The manifest says how many bytes an element has, so that a reader need not know the dtype."""
    text = np.frombuffer(b"float32newtypeint64qint8", U8)
    reader = crafted(dtype__text=text, dtype__bytes=np.array([7, 7, 5, 5], U8))
    index = reader.whole()
    assert index.dtypes[1] == "newtype"
    check_index(index)
