"""Several packages over an S3 server on loopback: compression, slices, stock, tools without torch, the manager."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dcp_all as dcp
from dcp_core import plugins
from dcp_core.testing.sharding import distribute
from integration_tests.kits.fault_proxy import FaultProxy, sometimes
from integration_tests.kits.s3_server import S3Server

pytest.importorskip("moto", reason="needs moto[s3]")
pytest.importorskip("s3fs", reason="needs s3fs")


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(4096, 1024, generator=generator) * 0.02).bfloat16()


WRITERS = {"obstore": dcp.ObjectStoreWriter, "fsspec": dcp.FsspecWriter}
READERS = {"obstore": dcp.ObjectStoreReader, "fsspec": dcp.FsspecReader}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("compression", [None, "auto", "zstd"])
def test_each_loads_what_each_saved(s3: S3Server, writer: str, reader: str, compression: Any) -> None:
    uri = f"s3://{s3.bucket}/each/{writer}-{reader}-{compression}"
    full = weights()
    dcp.save({"w": full, "step": 3}, storage_writer=WRITERS[writer](uri, compression=compression))
    template = {"w": torch.zeros_like(full), "step": 0}
    dcp.load(template, storage_reader=READERS[reader](uri))
    assert torch.equal(template["w"], full)
    assert template["step"] == 3


@pytest.mark.parametrize("compression", [None, "auto"])
def test_a_slice_reads_what_it_needs(s3: S3Server, compression: Any) -> None:
    uri = f"s3://{s3.bucket}/slice/{compression}"
    full = weights()
    dcp.save({"w": full}, storage_writer=dcp.ObjectStoreWriter(uri, compression=compression))
    part = {"w": torch.zeros(1024, 1024, dtype=torch.bfloat16)}
    with FaultProxy(s3.url) as proxy:
        reader = dcp.ObjectStoreReader(uri, storage_options={"endpoint": proxy.url})
        dcp.load(part, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_resize=True))
        given = proxy.bytes_given
    assert torch.equal(part["w"], full[:1024])
    assert given <= 1.1 * part["w"].nbytes + 16_384


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_reads_ours_and_ours_reads_stock(s3: S3Server) -> None:
    from torch.distributed.checkpoint import _fsspec_filesystem as stock
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    uri = f"s3://{s3.bucket}/stock"
    dcp.save({"w": weights()}, storage_writer=dcp.ObjectStoreWriter(f"{uri}/ours"))
    template = {"w": torch.zeros_like(weights())}
    load(template, storage_reader=stock.FsspecReader(f"{uri}/ours"))
    assert torch.equal(template["w"], weights())
    save({"w": weights()}, storage_writer=stock.FsspecWriter(f"{uri}/theirs"))
    for reader in READERS.values():
        template = {"w": torch.zeros_like(weights())}
        dcp.load(template, storage_reader=reader(f"{uri}/theirs"))
        assert torch.equal(template["w"], weights())


def test_specialised_storages_come_first() -> None:
    assert plugins.storage_for("s3://bucket/x").load_writer() is dcp.ObjectStoreWriter
    assert plugins.storage_for("memory://x").load_writer() is dcp.FsspecWriter


TOOL = """
import sys
from dcp_io import find_checkpoints, open_store, verify_checkpoint
root = open_store(sys.argv[1])
print(*(found.store.url.rpartition("/")[2] for found in find_checkpoints(root)))
print(all(verify_checkpoint(found.store).ok for found in find_checkpoints(root)))
print(open_store("memory://x").list())
assert "torch" not in sys.modules
"""


def test_tools_look_at_checkpoints_without_torch(s3: S3Server) -> None:
    root = f"s3://{s3.bucket}/tools"
    for step in (1, 2):
        dcp.save({"w": torch.ones(10)}, checkpoint_id=f"{root}/step-{step}")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", TOOL, root], capture_output=True, text=True, check=False, timeout=250
    )
    assert ran.stdout.split("\n")[:3] == ["step-2 step-1", "True", "[]"], ran.stderr


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="nosuch:// stores; install dcp-fsspec"):
        dcp.open_store("nosuch://x")


def run(root: str, options: dict[str, Any] | None, until: int) -> tuple[int | None, bool]:
    """Resume, check, and save up to a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(step: int) -> dict[str, Any]:
        full = torch.arange(4000.0).reshape(100, 40) + step
        return {"w": distribute(full, mesh, [Shard(0)]), "step": step}

    keep = dcp.KeepLast(2)
    with dcp.CheckpointManager(root, keep_policy=keep, storage_options=options) as manager:
        template = state(-1)
        restored = manager.restore(template)
        right = restored is None or torch.equal(template["w"].to_local(), state(restored.step)["w"].to_local())
        for step in range(1 if restored is None else restored.step + 1, until + 1):
            manager.maybe_save(step, state(step))
        return None if restored is None else restored.step, right


@pytest.mark.parametrize("faults", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "with faults"])
def test_the_manager_over_an_object_store(s3: S3Server, s3_ranks: Any, faults: bool) -> None:
    root = f"s3://{s3.bucket}/managed-{faults}"
    decide = sometimes(("503", "503 after", "drop", "drop after", "truncate"), rate=0.05, seed=1) if faults else None
    with FaultProxy(s3.url, decide) as proxy:
        options = {"endpoint": proxy.url} if faults else None
        assert s3_ranks.run(2, run, root, options, 4) == [(None, True)] * 2
        assert s3_ranks.run(1, run, root, options, 5) == [(4, True)]
        store = dcp.open_store(root)
        assert store.folders() == ("step-4", "step-5")
        assert store.read("latest") == b"step-5\n"
        index = store.child("step-5").read(".metadata")
        store.child("step-5").publish(".metadata", index[:-1])
        assert s3_ranks.run(2, run, root, options, 6) == [(4, True)] * 2
    assert dcp.open_store(root).folders() == ("step-5", "step-6")
    assert all(dcp.verify_checkpoint(dcp.open_store(f"{root}/step-{step}")).ok for step in (5, 6))


def _command(*arguments: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "dcp_inspect", *arguments], capture_output=True, text=True, check=False, timeout=250
    )


def test_the_command_looks_at_uris(s3: S3Server) -> None:
    root = f"s3://{s3.bucket}/command"
    for step in (1, 2):
        dcp.save({"w": weights(), "n": step}, storage_writer=dcp.ObjectStoreWriter(f"{root}/step-{step}"))
    listed = json.loads(_command("ls", root, "--json").stdout)
    assert [(one["path"], one["step"], one["complete"]) for one in listed] == [
        (f"{root}/step-{step}", step, True) for step in (2, 1)
    ]
    table = _command("ls", root).stdout
    assert "step-2" in table
    assert "complete" in table
    shown = json.loads(_command("show", f"{root}/step-1", "--json").stdout)
    assert {value["name"]: value["shape"] for value in shown["values"]} == {"w": [4096, 1024], "n": None}
    verified = _command("verify", f"{root}/step-1", "--json")
    assert (verified.returncode, json.loads(verified.stdout)["ok"]) == (0, True)
    missing = _command("verify", f"{root}/step-3")
    assert missing.returncode != 0
    assert "no checkpoint" in missing.stderr
    assert "Traceback" not in missing.stderr
