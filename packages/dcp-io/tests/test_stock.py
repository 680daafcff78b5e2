"""Checkpoints that torch's own `torch.distributed.checkpoint` wrote, and ours in its hands."""

from __future__ import annotations

import os
import warnings

import pytest

from dcp_io import StoreBackend, verify_checkpoint
from dcp_io.requests import ReadRequest
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import Framing

torch = pytest.importorskip("torch", reason="stock is the oracle")


@pytest.fixture
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as stock

        yield stock


@pytest.fixture
def stock_store(store, stock):
    stock.save({"a": torch.arange(50_000), "n": {"b": torch.ones(3)}, "step": 7}, checkpoint_id=store.path)
    return store


def requests_of(index):
    rows = [(name, index.stored_item(index.chunk_items, row)) for row, name in enumerate(index.tensor_names)]
    rows += [(name, index.stored_item(index.object_items, row)) for row, name in enumerate(index.object_names)]
    return [ReadRequest(name, item, 0, item.stored_bytes) for name, item in rows]


def test_what_stock_wrote_is_read_and_verified(stock_store):
    backend = StoreBackend(stock_store)
    requests = requests_of(backend.read_index())
    assert {request.key for request in requests} == {"a", "n.b", "step"}
    assert backend.read(requests).unverified_keys == set()
    report = verify_checkpoint(stock_store)
    assert report.ok, report.problems
    assert report.items == 3


def test_a_flipped_bit_that_stock_would_load_is_refused(stock_store):
    backend = StoreBackend(stock_store)
    (request,) = (request for request in requests_of(backend.read_index()) if request.key == "a")
    assert request.item.framing is Framing.TORCH_ZIP
    with open(os.path.join(stock_store.path, request.item.file), "r+b") as file:
        file.seek(request.item.offset + request.item.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptCheckpointError) as caught:
        backend.read([request])
    assert (caught.value.file, caught.value.key) == (request.item.file, "a")
    (problem,) = verify_checkpoint(stock_store).problems
    assert (problem.file, problem.key) == (request.item.file, "a")


def test_our_save_replaces_stocks(stock_store, helpers):
    save_id = helpers.save_all(stock_store, [{"x": b"1"}])
    assert helpers.names(stock_store) == [".metadata", f"__0_0.{save_id}.distcp"]
    assert helpers.load_all(stock_store) == {"x": b"1"}


def test_stock_loads_what_we_wrote(store, helpers, stock):
    data = {"a": bytes(range(250)) * 4000, "b": b"xyz", "e": b""}
    helpers.save_all(store, [data, {"c": b"1" * 70_000}], threads=2)
    state = {key: torch.zeros(len(value), dtype=torch.uint8) for key, value in data.items()}
    state["c"] = torch.zeros(70_000, dtype=torch.uint8)
    stock.load(state, checkpoint_id=store.path)
    assert {key: bytes(value.numpy()) for key, value in state.items()} == {**data, "c": b"1" * 70_000}
