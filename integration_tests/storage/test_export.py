"""Exports of a sharded model into an object store: one upload for each file, by one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load

import dcp_all as dcp
from dcp_io import open_store
from integration_tests.kits.s3_server import S3Server

pytest.importorskip("moto", reason="needs moto[s3]")

INDEX = "model.safetensors.index.json"


def test_ranks_export_into_an_object_store(s3_ranks: Any, s3: S3Server) -> None:
    def run(uri: str, version: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        from dcp_core.testing.sharding import distribute

        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(3_000_000.0).view(2000, 1500) + version
        state = {
            "rows": distribute(whole, mesh, [Shard(0)]),
            "columns": distribute(whole, mesh, [Shard(1)]),
            "scalar": torch.tensor(version),
        }
        dcp.save_safetensors(state, uri, max_file_bytes=13_000_000)

    uri = f"s3://{s3.bucket}/exported"
    for version in range(2):
        s3_ranks.run(2, run, uri, version)
    store = open_store(uri)
    names = {*json.loads(store.read(INDEX))["weight_map"].values()}
    assert {entry.name for entry in store.list()} == {INDEX, *names}
    assert len(names) == 2
    found = {name: tensor for file in names for name, tensor in load(store.read(file)).items()}
    whole = torch.arange(3_000_000.0).view(2000, 1500) + 1
    assert torch.equal(found["rows"], whole)
    assert torch.equal(found["columns"], whole)
    assert found["scalar"] == 1
