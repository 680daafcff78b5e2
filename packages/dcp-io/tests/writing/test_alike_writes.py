"""Small items of one kind, which are written together."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_io import LocalStore
from dcp_io.requests import Payload, WriteRequest
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.index.columns import Framing


class Alike:
    """Requests of one dtype and one size, resolved together."""

    def __init__(self, dtype, sizes):
        self.dtype, self.sizes = dtype, sizes
        self.calls = []

    def resolve(self, requests):
        self.calls.append(len(requests))
        return b"".join(request.data for request in requests)


class AlikeRequest:
    def __init__(self, key, data, alike):
        self.key, self.data, self.alike = key, data, alike
        self.cost_bytes = len(data)

    def resolve(self):
        return Payload(self.data, Framing.RAW, self.alike.dtype, self.alike.sizes)


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
def test_alike_requests_give_the_same_files_as_single_ones(tmp_path, layout, single_file):
    rng = np.random.default_rng(2)
    kinds = [Alike("float32", ()), Alike("bfloat16", (3,)), Alike("int8", (5, 1)), Alike("int64", (9,))]
    kinds += [Alike("float32", ())]  # of the size of another kind
    made = []
    for number in range(2500):
        alike = kinds[number % 5 if number < 2400 else 0]
        size = {"float32": 4, "bfloat16": 6, "int8": 5, "int64": 72}[alike.dtype]
        made.append(AlikeRequest(f"t{number}", rng.bytes(size), alike))
    made.insert(77, AlikeRequest("large", rng.bytes(100_000), Alike("uint8", (100_000,))))
    found = []
    for name, requests in (
        ("together", made),
        ("single", [WriteRequest(one.key, one.cost_bytes, one.resolve) for one in sorted(made, key=rank_of(made))]),
    ):
        store = LocalStore(tmp_path / name)
        store.make()
        items = write_items(
            store, requests, prefix="__0_", save_id="x", layout=layout, sync=False, single_file=single_file
        )
        found.append({one.key: item for one, item in zip(requests, items, strict=True)})
    together, single = found
    for one in made:
        data = (tmp_path / "together" / together[one.key].file).read_bytes()
        item = together[one.key]
        assert data[item.offset + item.lead :][: item.stored_bytes] == one.data
        other = single[one.key]
        assert (item.crc32, item.length, item.lead, item.framing) == (
            other.crc32, other.length, other.lead, other.framing,
        )  # fmt: skip
    if single_file:
        (first,), (second,) = ({item.file for item in each.values()} for each in found)
        assert (tmp_path / "together" / first).read_bytes() == (tmp_path / "single" / second).read_bytes()
        assert max(max(kind.calls) for kind in kinds) <= 1024
        assert sum(sum(kind.calls) for kind in kinds) == 2500
    else:
        assert not any(kind.calls for kind in kinds)


def rank_of(requests):
    """The order in which the engine writes the requests of one thread."""
    order = {position: n for n, position in enumerate(write_engine.assign_to_threads(requests, 1)[0])}
    ranks = {one.key: order[position] for position, one in enumerate(requests)}
    return lambda one: ranks[one.key]


def test_an_alike_payload_of_another_length_is_refused(tmp_path):
    store = LocalStore(tmp_path / "x")
    store.make()
    alike = Alike("float32", (2,))
    requests = [AlikeRequest(f"t{n}", bytes(4), alike) for n in range(20)]
    with pytest.raises(ValueError, match="'t0' has 4 bytes"):
        write_items(store, requests, prefix="__0_", save_id="x")
    assert store.list() == []
