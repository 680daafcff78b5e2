"""Several ranks: sharded saves and loads of safetensors, consolidation, and files that one rank reads for all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dcp_core import CheckpointException, CheckpointNotFoundError, load, save
from dcp_core.testing.trees import same
from dcp_format import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    consolidate_safetensors_files_on_every_rank,
)
from dcp_format.hugging_face.consolidate import consolidate_safetensors_files
from dcp_ranks.testing.ranks import RankError

SHARDS = {"rows": (10, 6), "columns": (6, 10), "wide": (9, 5)}


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "rows": torch.randn(10, 6),
        "columns": torch.randint(-100, 100, (6, 10), dtype=torch.int16),
        "wide": torch.randn(9, 5).to(torch.float8_e5m2),
        "scalar": torch.tensor(2.0),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 3, dtype=torch.bfloat16),
    }


def distributed(value: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rows and columns sharded, the others replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    placed: dict[str, Any] = {}
    for name, tensor in value.items():
        dim = {"rows": 0, "columns": 1, "wide": 0}.get(name)
        if dim is None:
            placed[name] = tensor.clone()
            continue
        parts = tensor.view(torch.uint8).chunk(size, dim) if tensor.element_size() == 1 else tensor.chunk(size, dim)
        local = parts[rank].contiguous() if rank < len(parts) else parts[0][:0] if dim == 0 else parts[0][:, :0]
        placed[name] = DTensor.from_local(
            local.view(tensor.dtype), mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
    return placed


def save_parts(path: str, *, consolidate: bool = False, mapping: dict[str, int] | None = None) -> None:
    writer = HuggingFaceStorageWriter(path, mapping, save_distributed=True, enable_consolidation=consolidate)
    save(distributed(whole()), storage_writer=writer)


def load_parts(path: str) -> tuple[bool, int]:
    value = whole()
    template = distributed({name: torch.zeros_like(tensor) for name, tensor in value.items()})
    reader = HuggingFaceStorageReader(path)
    load(template, storage_reader=reader)
    wanted = distributed(value)
    same = all(bits(local(template[name])) == bits(local(wanted[name])) for name in value)
    return same, reader.bytes_read


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_parts_load_on_other_numbers_of_ranks(ranks: Any, tmp_path: Path, readers: int) -> None:
    ranks.run(3, save_parts, str(tmp_path / "hf"))
    assert len(list((tmp_path / "hf").glob("shard-0000?-model-00001-of-00001.safetensors"))) == 3
    assert all(found for found, _ in ranks.run(readers, load_parts, str(tmp_path / "hf")))


def test_a_lost_part_is_noticed(ranks: Any, tmp_path: Path) -> None:
    ranks.run(3, save_parts, str(tmp_path / "hf"))
    (tmp_path / "hf" / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="2 of its 3 files are there"):
        load({"rows": torch.zeros(10, 6)}, storage_reader=HuggingFaceStorageReader(tmp_path / "hf"))
    with pytest.raises(CheckpointNotFoundError, match="2 of its 3 files are there"):
        consolidate_safetensors_files(str(tmp_path / "hf"), str(tmp_path / "out"), {"rows": 1})


MAPPING = {"rows": 1, "columns": 2, "wide": 3, "scalar": 3, "flags": 1, "half": 2}


def opened(path: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    loaded: dict[str, torch.Tensor] = {}
    for file in set(weight_map.values()):
        part = load_file(path / file)
        assert {name for name, at in weight_map.items() if at == file} == part.keys()
        loaded |= part
    return loaded


def test_writer_consolidates(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, lambda path: save_parts(path, consolidate=True, mapping=MAPPING), str(tmp_path))
    assert same(opened(tmp_path), whole())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_consolidating_on_every_rank(ranks: Any, tmp_path: Path, world_size: int) -> None:
    ranks.run(4, save_parts, str(tmp_path / "parts"))

    def consolidate(parts: str, out: str) -> None:
        consolidate_safetensors_files_on_every_rank(parts, out, MAPPING, num_threads=2)

    ranks.run(world_size, consolidate, str(tmp_path / "parts"), str(tmp_path / "out"))
    assert same(opened(tmp_path / "out"), whole())


@pytest.mark.parametrize(
    ("wrong", "told"), [("a name", "unknown"), ("the files", "do not fit"), ("the listing", "do not fit")]
)
def test_consolidating_fails_on_all_ranks(ranks: Any, tmp_path: Path, wrong: str, told: str) -> None:
    """The ranks have another mapping, or one does not see the files of an earlier save: these stay."""
    ranks.run(2, save_parts, str(tmp_path / "parts"))
    ranks.run(2, lambda path: save_parts(path, consolidate=True, mapping=MAPPING), str(tmp_path / "out"))
    before = sorted(path.name for path in (tmp_path / "out").iterdir())

    def consolidate(parts: str, out: str) -> str:
        from dcp_format.hugging_face import consolidate as module

        mapping, listed = MAPPING, module.earlier_files
        if dist.get_rank() == 1 and wrong == "the listing":
            module.earlier_files = lambda _: set()
        elif dist.get_rank() == 1:
            mapping = {**MAPPING, "unknown" if wrong == "a name" else "columns": 1}
        try:
            consolidate_safetensors_files_on_every_rank(parts, out, mapping)
        except CheckpointException as error:
            return str(error)
        finally:
            module.earlier_files = listed
        return "nothing"

    for said in ranks.run(2, consolidate, str(tmp_path / "parts"), str(tmp_path / "out")):
        assert "rank 1" in said or "all ranks" in said
        assert told in said
    assert same(opened(tmp_path / "out"), whole())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize("world_size", [0, 1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_a_full_disk_amid_a_consolidation(ranks: Any, tmp_path: Path, world_size: int, number: int) -> None:
    """No file of a set appears unless all are written: a folder without an index would be taken for the model."""

    def consolidate(parts: str, out: str) -> str:
        from dcp_format.hugging_face import consolidate as module

        real = module.write_tensor_file

        def write(sink: Any, *args: Any, **kwargs: Any) -> None:
            real(sink, *args, **kwargs)
            if f"model-0000{number}-of" in sink.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), sink.name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "write_tensor_file", write)
            call: Any = consolidate_safetensors_files_on_every_rank if world_size else consolidate_safetensors_files
            with pytest.raises((OSError, CheckpointException)) as caught:
                call(parts, out, MAPPING)
        return str(caught.value)

    ranks.run(2, save_parts, str(tmp_path / "parts"))
    for older in (False, True):
        out = tmp_path / "older" if older else tmp_path / "new"
        if older:
            consolidate_safetensors_files(str(tmp_path / "parts"), str(out), MAPPING)
        before = {path.name: path.read_bytes() for path in out.glob("*")}
        for text in ranks.run(world_size or 1, consolidate, str(tmp_path / "parts"), str(out)):
            assert os.strerror(errno.ENOSPC) in text
            assert f"model-0000{number}-of" in text
        assert {path.name: path.read_bytes() for path in out.glob("*")} == before


@pytest.mark.newest
@pytest.mark.interop
def test_stock_reads_our_parts_and_we_read_theirs(ranks: Any, tmp_path: Path) -> None:
    def theirs(path: str) -> None:
        import torch.distributed.checkpoint as stock

        stock.save(distributed(whole()), storage_writer=stock.HuggingFaceStorageWriter(path, save_distributed=True))

    def load_with_stock(path: str) -> bool:
        import torch.distributed.checkpoint as stock

        value = whole()
        template = distributed({name: torch.zeros_like(tensor) for name, tensor in value.items()})
        stock.load(template, storage_reader=stock.HuggingFaceStorageReader(path))
        wanted = distributed(value)
        return all(bits(local(template[name])) == bits(local(wanted[name])) for name in value)

    ranks.run(2, theirs, str(tmp_path / "theirs"))
    assert all(found for found, _ in ranks.run(3, load_parts, str(tmp_path / "theirs")))
    ranks.run(2, save_parts, str(tmp_path / "ours"))
    assert all(ranks.run(3, load_with_stock, str(tmp_path / "ours")))


def test_replicated_values_of_several_ranks(ranks: Any, tmp_path: Path) -> None:
    """Large enough that the planner would share one tensor's parts among the ranks."""

    def save_replicas(path: str) -> None:
        torch.manual_seed(0)
        value = {name: torch.randn(1000, 600) for name in "abc"}
        save(value, storage_writer=HuggingFaceStorageWriter(path))

    ranks.run(2, save_replicas, str(tmp_path))
    torch.manual_seed(0)
    assert same(opened(tmp_path), {name: torch.randn(1000, 600) for name in "abc"})


def test_a_part_needs_save_distributed(ranks: Any, tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        save(distributed(whole()), storage_writer=HuggingFaceStorageWriter(path))

    with pytest.raises(RankError, match="save_distributed=True"):
        ranks.run(2, refuse, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_read_are_those_needed(ranks: Any, tmp_path: Path, world_size: int) -> None:
    value = {f"w{n}": torch.randn(2048, 256) for n in range(4)}
    save_file(value, tmp_path / "model.safetensors")

    def read(path: str) -> tuple[bool, int, int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, zeros

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        template = {name: zeros(2048, 256, device_mesh=mesh, placements=[Shard(0)]) for name in value}
        reader = HuggingFaceStorageReader(path)
        load(template, storage_reader=reader)
        rank, size = dist.get_rank(), dist.get_world_size()
        wanted = all(torch.equal(template[name].to_local(), value[name].chunk(size)[rank]) for name in value)
        return wanted, reader.bytes_read, sum(template[name].to_local().nbytes for name in value)

    for right, taken, needed in ranks.run(world_size, read, str(tmp_path)):
        assert right
        assert taken <= 1.1 * needed


def broadcast(path: str, reading: int) -> bool:
    from dcp_format.torch_save import broadcasting_reader

    value = whole()
    template = distributed({name: torch.zeros_like(tensor) for name, tensor in value.items()})
    opened = broadcasting_reader.map_torch_save
    if dist.get_rank() != reading:
        broadcasting_reader.map_torch_save = None  # type: ignore[assignment]
    try:
        reader = BroadcastingTorchSaveReader(coordinator_rank=reading)
        load(template, checkpoint_id=path, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    finally:
        broadcasting_reader.map_torch_save = opened
    wanted = distributed(value)
    return all(bits(local(template[name])) == bits(local(wanted[name])) for name in value)


@pytest.mark.parametrize(("world_size", "reading"), [(1, 0), (2, 0), (4, 2)])
def test_one_rank_reads_for_all(ranks: Any, tmp_path: Path, world_size: int, reading: int) -> None:
    torch.save({**whole(), "more": torch.ones(2)}, tmp_path / "model.pt")
    assert all(ranks.run(world_size, broadcast, str(tmp_path / "model.pt"), reading))


def test_a_file_that_lacks_a_tensor_fails_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    torch.save({"rows": torch.ones(10, 6)}, tmp_path / "model.pt")

    def failing(path: str) -> str:
        try:
            load(
                {"rows": torch.zeros(10, 6), "lost": torch.zeros(3)},
                storage_reader=BroadcastingTorchSaveReader(path),
                planner=DynamicMetaLoadPlanner(),
            )
        except Exception as error:
            return str(error)
        return "nothing"

    assert all("lost" in told for told in ranks.run(2, failing, str(tmp_path / "model.pt")))
    assert all("missing.pt" in told for told in ranks.run(2, failing, str(tmp_path / "missing.pt")))


SHAPES = {"more rows": (12, 6), "fewer rows": (8, 6), "fewer columns": (10, 4), "another dimension": (10, 6, 1)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_another_shape_fails_on_all_ranks_before_anything_is_filled(
    ranks: Any, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    torch.save({"a": torch.ones(4), "rows": torch.ones(10, 6)}, tmp_path / "model.pt")

    def failing(path: str, shape: tuple[int, ...]) -> tuple[str, float]:
        rows = torch.zeros(shape if dist.get_rank() == 1 else (10, 6))
        template = {"a": torch.zeros(4), "rows": rows}
        try:
            load(template, storage_reader=BroadcastingTorchSaveReader(path), planner=DynamicMetaLoadPlanner())
        except Exception as error:
            return str(error), float(sum(each.sum() for each in template.values()))
        return "nothing", 0.0

    for told, filled in ranks.run(2, failing, str(tmp_path / "model.pt"), shape):
        assert f"'rows' has shape {[*shape]} in the template and [10, 6] in the file" in told
        assert filled == 0.0


def test_objects_cannot_be_broadcast(tmp_path: Path) -> None:
    torch.save({"step": 7}, tmp_path / "model.pt")
    reader = BroadcastingTorchSaveReader(tmp_path / "model.pt")
    with pytest.raises(Exception, match="torch_save_to_dcp"):
        load({"step": 0}, storage_reader=reader, planner=DynamicMetaLoadPlanner())


def test_two_boxes_of_one_rank(tmp_path: Path) -> None:
    """Stock keeps one of them (entry A4 of its weaknesses)."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    full = torch.randn(6, 8)
    boxes = LocalShardsWrapper([full[:, :3].clone(), full[:, 3:].clone()], [(0, 0), (0, 3)])
    save({"w": boxes}, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True))
    template = {"w": torch.zeros(6, 8)}
    load(template, storage_reader=HuggingFaceStorageReader(tmp_path / "hf"))
    assert torch.equal(template["w"], full)
    consolidate_safetensors_files(str(tmp_path / "hf"), str(tmp_path / "whole"), {"w": 1})
    assert torch.equal(opened(tmp_path / "whole")["w"], full)
