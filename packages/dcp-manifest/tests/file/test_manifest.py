from __future__ import annotations

import contextlib
import pickle
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_manifest import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError, read_index
from dcp_manifest.file.blob import FLAG_STUB_HEAD, FOOTER_BYTES, Blob, Footer, read_footer
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo
from dcp_manifest.stock.stock_write import stub_head

quick = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def parts(data):
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")
    start = footer.manifest_offset
    return data[:start], data[start : start + footer.manifest_bytes], footer


def resealed(data, change):
    """The file with its manifest changed and every CRC of the footer made right again."""
    head, manifest, footer = parts(data)
    manifest = change(manifest)
    sealed = Footer(len(head), len(manifest), zlib.crc32(head), zlib.crc32(manifest), footer.index_crc32, footer.flags)
    return head + manifest + sealed.to_bytes()


@pytest.mark.parametrize("interop", [True, False])
@pytest.mark.parametrize("which", ["rich", "own", "blocked"])
def test_what_is_written_is_read(which, interop, request, assert_same):
    index = request.getfixturevalue(which)
    data = encode(index, interop=interop)
    assert_same(index, read_index(data, file=".metadata"))
    assert_same(index, read_index(memoryview(bytearray(data)), file=".metadata"))


@quick
@given(st.data())
def test_any_index_survives(indexes, assert_same, data):
    index = data.draw(indexes)
    assert_same(index, read_index(encode(index), file="f"))


def test_equal_indexes_give_equal_bytes(rich, rich_bytes):
    assert encode(rich) == rich_bytes


def test_an_empty_index_survives(make_index, assert_same):
    index = make_index()
    assert_same(index, read_index(encode(index), file="f"))


def test_the_manifest_is_a_safetensors_file(rich_bytes):
    from safetensors.numpy import load

    _, manifest, footer = parts(rich_bytes)
    columns = load(bytes(manifest))
    assert bytes(columns["object.name.text"]).decode() == "opt.lrkäse.ß"
    assert footer.manifest_offset % 8 == 0


def test_columns_are_narrow_and_equal_rows_are_stored_once(rich_bytes, own_bytes):
    _, manifest, _ = parts(rich_bytes)
    columns = Blob(memoryview(manifest), file="f").header.columns
    assert {name: (column.dtype, column.count) for name, column in columns.items()}.items() >= {
        "chunk.position": ("<u8", 7),
        "chunk.offset.0": ("<u1", 6),
        "chunk.offset.1": ("<u1", 1),
        "chunk.crc32": ("<u4", 7),
        "tensor.owner": ("<u1", 1),
        "chunk.stored_bytes": ("<u4", 7),
    }.items()
    _, manifest, _ = parts(own_bytes)
    assert "chunk.stored_bytes" not in Blob(memoryview(manifest), file="f").header.columns


@pytest.mark.parametrize("which", ["rich_bytes", "own_bytes"])
def test_a_flip_of_any_byte_of_manifest_or_footer_is_refused(which, request):
    data = bytearray(request.getfixturevalue(which))
    start = parts(bytes(data))[2].manifest_offset
    for place in range(start, len(data)):
        for bit in (0x01, 0x80):
            data[place] ^= bit
            with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
                read_index(bytes(data), file=".metadata")
            data[place] ^= bit


@pytest.mark.parametrize("which", ["rich_bytes", "own_bytes"])
def test_a_truncation_at_any_length_is_refused(which, request):
    data = request.getfixturevalue(which)
    head, _, footer = parts(data)
    stubbed = footer.flags & FLAG_STUB_HEAD
    # Behind a real head every length takes the same way, a slow one: the pickle, then bytes behind its end.
    slow = () if stubbed else range(len(head) + 20, len(data) - 100)
    for length in sorted({*range(len(data))} - {*slow} | {*slow[::37]}):
        with pytest.raises(CorruptCheckpointError):
            read_index(data[:length], file="f")


@quick
@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(rich, rich_bytes, assert_same, data):
    """Flips, cuts and insertions, several at once: an error of ours, or the index as it was (the head is not ours)."""
    damaged = bytearray(rich_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
        if kind == "flip":
            damaged[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del damaged[place : place + data.draw(st.integers(1, 100))]
        elif kind == "insert":
            damaged[place:place] = data.draw(st.binary(min_size=1, max_size=20))
        else:
            damaged[place : place + 8] = damaged[place : place + 8][::-1]
        if not damaged:
            break
    try:
        index = read_index(bytes(damaged), file="f")
    except (CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError):
        return
    assert_same(rich, index)


def test_flips_of_the_head_are_harmless(rich, rich_bytes, assert_same):
    damaged = bytearray(rich_bytes)
    damaged[10] ^= 255
    assert_same(rich, read_index(bytes(damaged), file="f"))


@quick
@given(st.data())
def test_a_crafted_manifest_is_refused_or_makes_sense(rich_bytes, data):
    """The CRC is right, but the columns are not: still no other exception than ours, and no wild allocation."""

    def change(manifest):
        changed = bytearray(manifest)
        header = 8 + struct.unpack("<Q", manifest[:8])[0]
        for _ in range(data.draw(st.integers(1, 3))):
            where = st.integers(8, header - 1) | st.integers(header, len(changed) - 1)
            changed[data.draw(where)] = data.draw(st.integers(0, 255) | st.sampled_from(b"0129"))
        return bytes(changed)

    with contextlib.suppress(CorruptCheckpointError, UnsafeCheckpointError):
        read_index(resealed(rich_bytes, change), file="f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"chunk\\":7', b'\\"chunk\\":8'),
        (b'\\"tensor\\":6', b'\\"tensor\\":9'),
        (b'\\"world_size\\":2', b'\\"world_size\\":x'),
        (b'\\"save_id\\":\\"0123456789abcdef\\"', b'\\"save_id\\":  12345678901234567 '),
        (b"chunk.position", b"chunk.nowhere_"),
        (b"model.wmodel.b", b"model.wmodel.w"),
        (b'"dtype":"U8"', b'"dtype":"I8"'),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(rich_bytes, old, new):
    assert len(old) == len(new)

    def change(manifest):
        assert old in manifest
        return manifest.replace(old, new)

    with pytest.raises(CorruptCheckpointError, match="f"):
        read_index(resealed(rich_bytes, change), file="f")


def test_a_huge_row_count_allocates_nothing(rich_bytes):
    text = b'\\"chunk\\":7'

    def change(manifest):
        length = struct.unpack("<Q", manifest[:8])[0]
        header = manifest[8 : 8 + length].replace(text, b'\\"chunk\\":1000000000000').rstrip(b" ")
        return struct.pack("<Q", len(header)) + header + manifest[8 + length :]

    with pytest.raises(CorruptCheckpointError, match="1000000000000 rows of chunk"):
        read_index(resealed(rich_bytes, change), file="f")


def test_unknown_columns_and_metadata_are_ignored(rich, rich_bytes, assert_same):
    def change(manifest):
        length = struct.unpack("<Q", manifest[:8])[0]
        header = manifest[8 : 8 + length].rstrip(b" ")
        data = manifest[8 + length :]
        more = f',"zz.new":{{"dtype":"F64","shape":[1],"data_offsets":[{len(data)},{len(data) + 8}]}}}}'
        header = header[:-1] + more.encode()
        header = header.replace(b'\\"info\\":{', b'\\"info\\":{\\"new\\":[1,2],')
        return struct.pack("<Q", len(header)) + header + data + bytes(8)

    assert_same(rich, read_index(resealed(rich_bytes, change), file="f"))


def version_changed(data, major, minor):
    fields = bytearray(data[-FOOTER_BYTES:])
    fields[8:12] = struct.pack("<HH", major, minor)
    fields[56:60] = struct.pack("<I", zlib.crc32(fields[:56]))
    return data[:-FOOTER_BYTES] + bytes(fields)


def test_a_newer_major_version_is_refused_with_a_sentence(rich_bytes):
    with pytest.raises(UnsupportedFormatError, match=r"format 4\.0.*install a newer dcp-manifest"):
        read_index(version_changed(rich_bytes, 4, 0), file="f")


def test_a_newer_minor_version_is_read(rich, rich_bytes, assert_same):
    assert_same(rich, read_index(version_changed(rich_bytes, 1, 9), file="f"))


def test_a_lost_footer_is_never_taken_for_a_checkpoint_of_stocks(rich_bytes, own_bytes):
    head, manifest, _ = parts(rich_bytes)
    stub, _, footer = parts(own_bytes)
    assert footer.flags & FLAG_STUB_HEAD
    for data in (head, head.rstrip(b"\0"), head + manifest, stub, rich_bytes[:-FOOTER_BYTES] + bytes(FOOTER_BYTES)):
        with pytest.raises(CorruptCheckpointError):
            read_index(data, file="f")


def test_the_stub_raises_a_sentence_when_it_is_unpickled():
    with pytest.raises(RuntimeError, match=r"written by dcp .* because it is raw; load it with dcp_all\.load"):
        pickle.loads(stub_head("it is raw"))


def test_the_stub_says_why(own_bytes, rich):
    with pytest.raises(RuntimeError, match="values that belong to single ranks"):
        pickle.loads(own_bytes)
    with pytest.raises(RuntimeError, match="interop=False"):
        pickle.loads(encode(rich, interop=False))


def test_an_own_head_is_taken(rich, assert_same):
    data = encode(rich, head=b"anything")
    assert data.startswith(b"anything")
    assert_same(rich, read_index(data, file="f"))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "", "a\\b", "a\0b", "./a", "C:/x", "a/."])
def test_paths_that_lead_elsewhere_are_refused(path, rich, rich_bytes):
    rich.files = (path, rich.files[1])
    with pytest.raises(UnsafeCheckpointError):
        encode(rich)
    padded = path.encode().ljust(29, b"\\")[:29]

    def change(manifest):
        assert manifest.count(b"__0_0.0123456789abcdef.distcp") == 1
        return manifest.replace(b"__0_0.0123456789abcdef.distcp", padded)

    with pytest.raises(UnsafeCheckpointError, match="f names the data file"):
        read_index(resealed(rich_bytes, change), file="f")


BROKEN = {
    "no info": lambda index: setattr(index, "info", None),
    "chunk outside": lambda index: setattr(index, "chunk_offsets", index.chunk_offsets + 1),
    "raw bytes": lambda index: index.chunk_items.stored_bytes.__setitem__(0, 47),
    "file row": lambda index: index.chunk_items.file.__setitem__(3, 9),
    "dtype row": lambda index: index.tensor_dtype.__setitem__(0, 4),
    "chain row": lambda index: index.object_items.chain.__setitem__(0, 2),
    "twice": lambda index: index.tensor_names.__setitem__(1, "step"),
    "alias of a value": lambda index: index.alias_names.__setitem__(0, "step"),
    "alias target": lambda index: index.alias_targets.__setitem__(0, 77),
    "running": lambda index: setattr(index.chunk_items, "running_crcs", index.chunk_items.running_crcs[1:]),
    "length": lambda index: index.chunk_items.length.__setitem__(0, 3),
    "position": lambda index: index.chunk_items.offset.__setitem__(0, 2**62),
    "framing": lambda index: index.chunk_items.framing.__setitem__(0, 3),
    "raw object": lambda index: index.object_items.framing.__setitem__(0, 0),
    "checked": lambda index: index.chunk_items.checked.__setitem__(6, 2),
    "trail": lambda index: index.chunk_items.length.__setitem__(0, 2**33),
    "flags": lambda index: index.tensor_flags.__setitem__(0, 0xFF),
    "path": lambda index: index.paths.__setitem__("step", (1.5,)),
    "ndim": lambda index: setattr(index, "tensor_shape", index.tensor_shape[1:]),
    "rows": lambda index: setattr(index, "tensor_owner", index.tensor_owner[1:]),
    "negative": lambda index: index.chunk_sizes.__setitem__(0, -1),
    "no ranks": lambda index: setattr(index, "info", ManifestInfo("s", 0, "w")),
    "rank": lambda index: setattr(index, "info", ManifestInfo("s", 2, "w", rank=2)),
    "negative rank": lambda index: setattr(index, "info", ManifestInfo("s", 2, "w", rank=-1)),
    "generation": lambda index: setattr(index, "info", ManifestInfo("s", 2, "w", -1)),
    "negative size": lambda index: index.tensor_shape.__setitem__(0, -5),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_an_index_that_contradicts_itself_is_not_written(change, rich):
    change(rich)
    with pytest.raises(UnsupportedFormatError):
        encode(rich)


def test_info_is_kept_whole(rich):
    rich.info = ManifestInfo("s", 4, "w/2", 0, 3, 2**70, (("k", "v"), ("", "ü\n")))
    assert read_index(encode(rich), file="f").info == rich.info
