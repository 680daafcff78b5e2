"""Items in encoded blocks: reads of any part in any way of delivery, and damage."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io import verify_checkpoint
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import Payload, ReadRequest, WriteRequest
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing
from dcp_manifest.index.runs import Runs
from integration_tests.kits.damage import flip

RNG = np.random.default_rng(5)
BLOCK = 4096
SIZES = [1, BLOCK - 1, BLOCK, 3 * BLOCK, 10 * BLOCK + 77, 200_000]


class Stretch:
    """Encodes each block with a header and a few more bytes, depending on its contents; decodes it."""

    block_bytes = BLOCK
    descriptors = ("block.stretch/1",)

    def encode(self, block):
        return struct.pack("<I", len(block)) + bytes(block)[::-1] + bytes(block[0] % 7)

    def decode(self, data, into):
        (size,) = struct.unpack_from("<I", data)
        if size != len(into):
            raise ValueError(f"it is {size} bytes long")
        into[:] = bytes(data[4 : 4 + size])[::-1]


class Pieces:
    """Payload that is produced piece by piece."""

    def __init__(self, data, step):
        self.data, self.step, self.nbytes = data, step, len(data)

    def pieces(self, max_bytes):
        for start in range(0, len(self.data), self.step):
            yield memoryview(self.data)[start : start + self.step]


def request(key, data, step=None):
    payload = Payload(memoryview(data) if step is None else Pieces(data, step), Framing.RAW, "uint8", (len(data),))
    return WriteRequest(key, len(data), lambda: replace(payload, blocks=Stretch()))


@pytest.fixture
def written(store, helpers, monkeypatch):
    """Values by key and their items in two files, between plain ones."""
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    data = {f"t{n}": RNG.bytes(size) for n, size in enumerate(SIZES)}
    requests = [request(key, value, 1000 if key == "t4" else None) for key, value in data.items()]
    requests += [helpers.raw_request("plain", data["t3"]), request("empty", b"")]
    items = write_items(store, requests, prefix="__0_", save_id="abc", threads=2, sync=False)
    return data, dict(zip([*data, "plain", "empty"], items, strict=True))


def read_request(key, item, size, start, stop, **more):
    return ReadRequest(key, item, start, stop, decoder=Stretch(), decoded_bytes=size, **more)


def test_what_is_recorded_of_blocks(written):
    data, items = written
    for key, value in data.items():
        item = items[key]
        assert item.blocks.block_bytes == BLOCK
        assert len(item.blocks.lengths) == len(item.blocks.crcs) == -(-len(value) // BLOCK)
        assert item.blocks.lengths.sum() == item.stored_bytes == item.length
        assert (item.framing, item.chain, item.running_crcs) == (Framing.RAW, ("block.stretch/1",), None)
    assert items["plain"].blocks is None
    assert (items["empty"].blocks, items["empty"].chain) == (None, ())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(SIZES) - 1), st.floats(0, 1), st.floats(0, 1), st.sampled_from("ipd")),
        min_size=1,
        max_size=6,
    ),
    threads=st.integers(1, 3),
    verify=st.sampled_from(["blocks", "full", "before", False]),
)
def test_any_part_in_any_way(store, written, cuts, threads, verify):
    data, items = written
    requests, checks, done = [], [], []
    for number_of_cut, (number, low, high, way) in enumerate(cuts):
        key = f"t{number}"
        start, stop = sorted((int(low * SIZES[number]), int(high * SIZES[number])))
        memory = bytearray(stop - start)

        def piece(position, part, memory=memory, start=start):
            memory[position - start : position - start + len(part)] = part

        def finish(view, memory=memory, way=way, number=number_of_cut):
            done.append(number)
            if way == "d":
                memory[:] = view

        more = {"i": {"into": memoryview(memory)}, "p": {"piece": piece}, "d": {}}[way]
        requests.append(read_request(key, items[key], SIZES[number], start, stop, done=finish, **more))
        checks.append((memory, data[key][start:stop]))
    read_items(store, requests, threads=threads, verify=verify)
    assert sorted(done) == list(range(len(requests)))
    for found, expected in checks:
        assert found == expected


def test_only_blocks_that_are_needed_are_read(store, written):
    _, items = written
    item, size = items["t5"], SIZES[5]
    memory = bytearray(100)
    stats = read_items(store, [read_request("t5", item, size, BLOCK + 5, BLOCK + 105, into=memoryview(memory))])
    assert stats.bytes_read == item.blocks.lengths[1]
    pieces = {}
    runs = Runs(0, 10, counts=(3,), strides=(8 * BLOCK,))
    wanted = read_request("t5", item, size, 0, runs.stop, runs=runs, piece=lambda at, part: pieces.update({at: part}))
    stats = read_items(store, [wanted])
    assert sorted(pieces) == [0, 8 * BLOCK, 16 * BLOCK]
    whole = read_items(store, [replace(wanted, piece=lambda at, part: None)], verify="full")
    assert whole.bytes_read == item.stored_bytes > 10 * stats.bytes_read


@pytest.mark.parametrize("verify", ["blocks", "before", "full"])
def test_a_flipped_bit_is_found_before_it_is_decoded(store, written, verify):
    _, items = written
    item = items["t5"]
    place = item.offset + int(item.blocks.lengths[:7].sum()) + 11
    flip(os.path.join(store.url, item.file), place, 16)
    memory = bytearray(SIZES[5])
    with pytest.raises(CorruptCheckpointError, match="differ from what was written") as error:
        read_items(store, [read_request("t5", item, SIZES[5], 0, SIZES[5], into=memoryview(memory))], verify=verify)
    assert (error.value.file, error.value.key) == (item.file, "t5")
    assert place - 11 <= error.value.offset <= place
    part = read_request("t5", item, SIZES[5], 0, BLOCK, into=memoryview(bytearray(BLOCK)))
    if verify == "full":
        with pytest.raises(CorruptCheckpointError):
            read_items(store, [part], verify=verify)
    else:
        read_items(store, [part], verify=verify)


def test_a_block_that_becomes_something_else_is_refused(store, written):
    _, items = written
    item = items["t5"]
    wrong = replace(item, blocks=replace(item.blocks, block_bytes=BLOCK // 2))
    with pytest.raises(CorruptCheckpointError, match="blocks of 2048 bytes"):
        read_items(store, [read_request("t5", wrong, SIZES[5], 0, 1)])
    short = replace(items["t3"], blocks=replace(items["t3"].blocks, block_bytes=BLOCK - 1))
    with pytest.raises(CorruptCheckpointError, match=r"cannot be decoded.*4096 bytes long") as error:
        read_items(store, [read_request("t3", short, 3 * BLOCK - 3, 0, 3 * BLOCK - 3)])
    assert (error.value.key, error.value.file) == ("t3", items["t3"].file)
    with pytest.raises(ValueError, match="outside its decoded blocks"):
        read_items(store, [read_request("t5", item, SIZES[5], 0, SIZES[5] + 1)])
    with pytest.raises(ValueError, match="destination"):
        read_items(store, [read_request("t5", item, SIZES[5], 0, 10, into=memoryview(bytearray(9)))])


def test_an_error_of_the_encoder_leaves_nothing(store):
    class Broken(Stretch):
        def encode(self, block):
            raise ZeroDivisionError("no")

    payload = Payload(bytes(9), Framing.RAW, "uint8", (9,), blocks=Broken())
    with pytest.raises(ZeroDivisionError):
        write_items(store, [WriteRequest("t", 9, lambda: payload)], prefix="__0_", save_id="abc")
    assert store.list() == []


def test_verifying_names_the_damaged_block(store, helpers, written):
    data, items = written
    tensors = {key: ("uint8", (len(value),), items[key]) for key, value in data.items()}
    tensors["plain"] = ("uint8", (SIZES[3],), items["plain"])
    tensors["empty"] = ("uint8", (0,), items["empty"])
    index = helpers.make_index(tensors)
    store.publish(".metadata", encode(index))
    assert read_index(encode(index), file="f").chunk_items.blocks is not None
    assert verify_checkpoint(store).ok
    item = items["t4"]
    place = item.offset + int(item.blocks.lengths[:3].sum())
    flip(os.path.join(store.url, item.file), place + 9, 16)
    (problem,) = verify_checkpoint(store).problems
    assert (problem.key, problem.file, problem.offset) == ("t4", item.file, place)
