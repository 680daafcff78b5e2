"""`s3torchconnector`'s own writer and reader, which derive from stock's, in our save and load and beside our storage.

Its classes take no endpoint: the client inside is replaced by one of theirs that has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dcp_all as dcp
from integration_tests.kits.s3_server import S3Server

connector = pytest.importorskip("s3torchconnector", reason="needs s3torchconnector")
pytest.importorskip("moto", reason="needs moto[s3]")

from s3torchconnector import S3ClientConfig  # noqa: E402
from s3torchconnector._s3client import S3Client  # noqa: E402
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter  # noqa: E402

URI = "s3://bucket/connector/step-{}"
STATE = {"model": {"weight": torch.arange(100_000.0), "bias": torch.ones(3)}, "step": 7}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, server.in_environment():
        yield server


def pointed_at(server: S3Server, storage: Any) -> Any:
    config = S3ClientConfig(force_path_style=True)
    storage.fs._client = S3Client(region="us-east-1", endpoint=server.url, s3client_config=config)
    return storage


def empty() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(100_000), "bias": torch.zeros(3)}, "step": 0}


def same(state: dict[str, Any]) -> bool:
    model, wanted = state["model"], STATE["model"]
    return state["step"] == 7 and all(torch.equal(model[name], wanted[name]) for name in wanted)  # type: ignore[attr-defined,index]


LOADS = {
    "their reader in our load": lambda server, uri, state: dcp.load(
        state, storage_reader=pointed_at(server, S3StorageReader("us-east-1", uri))
    ),
    "our reader": lambda server, uri, state: dcp.load(state, checkpoint_id=uri),
    "their reader in stock's load": lambda server, uri, state: stock_load(
        state, pointed_at(server, S3StorageReader("us-east-1", uri))
    ),
}


def stock_load(state: dict[str, Any], reader: Any) -> None:
    import torch.distributed.checkpoint as stock

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(state, storage_reader=reader)


@pytest.mark.interop
def test_their_writer_in_our_save(server: S3Server) -> None:
    uri = URI.format(1)
    metadata = dcp.save(STATE, storage_writer=pointed_at(server, S3StorageWriter("us-east-1", uri, thread_count=2)))
    assert set(metadata.state_dict_metadata) == {"model.weight", "model.bias", "step"}
    for way, load in LOADS.items():
        state = empty()
        load(server, uri, state)
        assert same(state), way


@pytest.mark.interop
def test_their_reader_reads_what_we_wrote(server: S3Server) -> None:
    uri = URI.format(2)
    dcp.save(STATE, checkpoint_id=uri)
    for way, load in LOADS.items():
        state = empty()
        load(server, uri, state)
        assert same(state), way


@pytest.mark.interop
def test_their_writer_in_the_background(server: S3Server) -> None:
    writer = pointed_at(server, S3StorageWriter("us-east-1", URI.format(3)))
    future: Any = dcp.async_save({"model": STATE["model"], "step": 7}, storage_writer=writer)
    future.result(60)
    state = empty()
    dcp.load(state, checkpoint_id=URI.format(3))
    assert same(state)
