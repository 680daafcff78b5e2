"""Exports on real ranks: every sharding, cast, names, sizes of files, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from dcp_core import CheckpointException, load, save
from dcp_core.testing.trees import same
from dcp_format import HuggingFaceStorageReader, HuggingFaceStorageWriter, save_safetensors
from dcp_format.conversion import open_content
from dcp_format.export import gathering, safetensors_writer, shared_files, write_files
from dcp_io import LocalStore
from dcp_ranks.testing.ranks import RankError
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor, MethodTensor

INDEX = "model.safetensors.index.json"


def whole(version: int = 1) -> dict[str, torch.Tensor]:
    maker = torch.Generator().manual_seed(version)
    return {
        "rows": torch.randn(10, 6, generator=maker),
        "columns": torch.randint(-100, 100, (6, 10), dtype=torch.int16, generator=maker),
        "wide": torch.randn(9, 5, generator=maker).to(torch.float8_e5m2),
        "experts": torch.randn(3, 8, 5, generator=maker).bfloat16(),
        "scalar": torch.tensor(float(version)),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 4),
    }


def placed(value: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sharded over all ranks by rows, columns and middle dimensions; the others replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, tensor in value.items():
        dim = {"rows": 0, "columns": 1, "wide": 0, "experts": 1}.get(name)
        if dim is None:
            found[name] = tensor.clone()
            continue
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        parts = bits.chunk(size, dim)
        part = parts[rank] if rank < len(parts) else bits.narrow(dim, 0, 0)
        found[name] = DTensor.from_local(
            part.contiguous().view(tensor.dtype), mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride()
        )
    return found


def exported(path: Path) -> dict[str, torch.Tensor]:
    """What libraries find in a folder: by its index, or in its only file."""
    if not (path / INDEX).exists():
        (file,) = path.glob("*.safetensors")
        return load_file(file)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted({*weight_map.values()}):
        part = load_file(path / file)
        assert {name for name, at in weight_map.items() if at == file} == part.keys()
        found |= part
    return found


def export(path: str, version: int = 1, **options: Any) -> None:
    save_safetensors(placed(whole(version)), path, **options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_write_whole_tensors(ranks: Any, tmp_path: Path, world_size: int) -> None:
    ranks.run(world_size, export, str(tmp_path))
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert same(exported(tmp_path), whole())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_exports_replace_each_other(ranks: Any, tmp_path: Path) -> None:
    """One file, a set, a set, one file, one file: nothing of an earlier one stays."""
    for version, limit in enumerate([10**9, 200, 100, 10**9, 10**9], 1):
        ranks.run(2, lambda path, *rest: export(path, rest[0], max_file_bytes=rest[1]), str(tmp_path), version, limit)
        assert same(exported(tmp_path), whole(version))
        files = [*tmp_path.glob("*.safetensors")]
        assert (len(files) == 1) == (limit == 10**9)
        assert {*os.listdir(tmp_path)} <= {file.name for file in files} | {INDEX}
        assert all(sum(t.nbytes for t in load_file(file).values()) <= max(limit, 240) for file in files)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_an_export_is_cast_and_renamed(ranks: Any, tmp_path: Path) -> None:
    def run(path: str) -> None:
        state = {"net": placed(whole()), "rows": torch.ones(3)}
        save_safetensors(state, path, dtype=torch.float16, rename={"net": "", "rows": "head.rows"})

    ranks.run(2, run, str(tmp_path))
    wanted = {name: t.to(torch.float16) if t.is_floating_point() else t for name, t in whole().items()}
    assert same(exported(tmp_path), {**wanted, "head.rows": torch.ones(3, dtype=torch.float16)})


@pytest.mark.parametrize("limit", [10**9, 100])
def test_stacked_experts_become_tensors_of_their_own(ranks: Any, tmp_path: Path, limit: int) -> None:
    def run(path: str, limit: int) -> None:
        state = {"layers": {"0": placed(whole()), "10": {"experts": torch.arange(6.0).view(3, 2)}}}
        split = {"layers.*.experts": "layers.*.e.{}.w"}
        save_safetensors(state, path, split=split, dtype=torch.float32, max_file_bytes=limit)

    ranks.run(2, run, str(tmp_path), limit)
    found = exported(tmp_path)
    for number in range(3):
        assert torch.equal(found[f"layers.0.e.{number}.w"], whole()["experts"][number].float())
        assert torch.equal(found[f"layers.10.e.{number}.w"], torch.arange(6.0).view(3, 2)[number])
    assert len(found) == len(whole()) - 1 + 6


@pytest.mark.parametrize("writer", ["ours", "stock's names"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_stocks_reader_loads_an_export(ranks: Any, tmp_path: Path, writer: str, world_size: int) -> None:
    def run(path: str, writer: str) -> bool:
        import warnings

        from dcp_core import save

        if writer == "ours":
            export(path, max_file_bytes=150)
        else:
            hugging = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
            save(placed(whole()), storage_writer=hugging)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch.distributed.checkpoint as stock

            template = placed({name: torch.zeros_like(tensor) for name, tensor in whole().items()})
            del template["scalar"], template["nothing"]  # stock's reader takes neither
            stock.load(template, storage_reader=stock.HuggingFaceStorageReader(path))
        wanted = placed(whole())
        local = [
            (getattr(one, "_local_tensor", one), getattr(wanted[n], "_local_tensor", wanted[n]))
            for n, one in template.items()
        ]
        return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in local)

    assert all(ranks.run(world_size, run, str(tmp_path), writer))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    model = Tied()
    save_safetensors(model.state_dict(), tmp_path)
    assert exported(tmp_path).keys() == {"embed.weight"}
    again = Tied()
    assert load_model(again, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(again.head.weight, model.head.weight)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    template = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    load(template, storage_reader=HuggingFaceStorageReader(tmp_path))
    assert same(template, dict(model.state_dict()))
    assert open_content(tmp_path).aliases == {"head.weight": "embed.weight"}


def test_the_second_export_of_tied_tensors_plans_as_the_first(tmp_path: Path) -> None:
    """Its plan comes from the cache, which must know what the first one knew."""
    model = Tied()
    for _ in range(2):
        save_safetensors(model.state_dict(), tmp_path, rename={"head": "out"})
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert file.metadata()["out.weight"] == "embed.weight"


def test_configuration_is_copied(tmp_path: Path) -> None:
    source, out = tmp_path / "base", tmp_path / "out"
    source.mkdir()
    files = {"config.json": "{}", "tokenizer.json": "[]", "merges.txt": "a b"}
    for name, text in {**files, "model.safetensors": "?", "train.py": "?", INDEX: "?"}.items():
        (source / name).write_text(text)
    save_safetensors({"w": torch.ones(3)}, out, config_from=source)
    assert {name: (out / name).read_text() for name in files} == files
    assert {*os.listdir(out)} == {*files, "model.safetensors"}
    save_safetensors({"w": torch.ones(4)}, out, config_from=out)
    assert {name: (out / name).read_text() for name in files} == files


def test_files_are_more_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a few are open at once; each is synced before it is closed, also one that is opened again."""
    open_now: dict[str, int] = {}
    synced: set[str] = set()
    most = 0

    class Counting(LocalStore):
        def open_sized(self, name: str) -> Any:
            nonlocal most
            sink = super().open_sized(name)
            open_now[name] = open_now.get(name, 0) + 1
            most = max(most, sum(open_now.values()))
            close = sink.close

            def closing(*, sync: bool) -> None:
                close(sync=sync)
                open_now[name] -= 1
                if sync:
                    synced.add(name)

            sink.close = closing  # type: ignore[method-assign]
            return sink

    monkeypatch.setattr(safetensors_writer, "open_store", Counting)
    monkeypatch.setattr(write_files, "_MOST_OPEN", 2)
    state = {f"w{number}": torch.full((5,), float(number)) for number in range(12)}
    save_safetensors(state, tmp_path, max_file_bytes=1)
    assert same(exported(tmp_path), state)
    assert (most, len(synced), {*open_now.values()}) == (3, 12, {0})


@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_fails_leaves_the_earlier_export(ranks: Any, tmp_path: Path, sends: bool) -> None:
    ranks.run(2, export, str(tmp_path))

    def run(path: str, sends: bool) -> str:
        where: Any = gathering.Gathering if sends else write_files
        name = "_send" if sends else "write_box"
        kept = getattr(where, name)
        if dist.get_rank() == 1:

            def refuse(*_: Any) -> int:
                raise OSError(errno.EIO, "the disk of this rank failed")

            setattr(where, name, refuse)
        try:
            export(path, 2)
        except CheckpointException as error:
            return str(error)
        finally:
            setattr(where, name, kept)
        return ""

    assert all("the disk of this rank failed" in text for text in ranks.run(2, run, str(tmp_path), sends))
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert same(exported(tmp_path), whole())


DIFFERENT: dict[str, Any] = {
    "dtype": torch.float16, "rename": {"rows": "lines"}, "split": {"rows": "{}.row"}, "max_file_bytes": 100
}  # fmt: skip


def test_ranks_must_agree_on_options(ranks: Any, tmp_path: Path) -> None:
    """Also after an export with the same ones, which is planned from the cache."""

    def run(path: str, different: dict[str, Any]) -> list[str]:
        found = []
        export(path)
        for name, value in different.items():
            try:
                export(path, 2, **({name: value} if dist.get_rank() == 1 else {}))
            except CheckpointException as error:
                found.append(str(error))
        return found

    for texts in ranks.run(2, run, str(tmp_path), DIFFERENT):
        assert len(texts) == len(DIFFERENT)
        assert all(f"rank 1 exports with {name}=" in text for name, text in zip(DIFFERENT, texts, strict=True))
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert same(exported(tmp_path), whole())


def on_several_hosts() -> Any:
    """Make each rank say that it is on a host of its own; returns what to put back."""
    rank = dist.get_rank()
    kept = shared_files.RankFacts.of_this_rank
    shared_files.RankFacts.of_this_rank = classmethod(  # type: ignore[method-assign]
        lambda cls, aliases, settings=None: cls(f"host {rank}", dict(aliases or {}), dict(settings or {}))
    )
    return kept


@pytest.mark.parametrize("writer", ["ours", "stock's names"])
def test_hosts_that_may_not_share_a_block_pass_bytes_on(ranks: Any, tmp_path: Path, writer: str) -> None:
    def run(path: str, writer: str) -> None:
        from dcp_core import save

        kept = on_several_hosts()
        try:
            if writer == "ours":
                export(path)
            else:
                hugging = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
                save(placed(whole()), storage_writer=hugging)
        finally:
            shared_files.RankFacts.of_this_rank = kept  # type: ignore[method-assign]

    ranks.run(3, run, str(tmp_path), writer)
    assert same(exported(tmp_path), whole())
    assert len([*tmp_path.glob("*.safetensors")]) == 1


def test_a_single_rank_may_not_plan_alone(ranks: Any, tmp_path: Path) -> None:
    def run(path: str) -> None:
        from dcp_core import save

        writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
        save({"w": torch.ones(3)}, storage_writer=writer, use_collectives=False)

    with pytest.raises(RankError, match="use_collectives=True"):
        ranks.run(2, run, str(tmp_path))


def test_columns_wait_for_each_other_in_bounded_memory(ranks: Any, tmp_path: Path) -> None:
    """Bands of several tensors, more than an owner takes at once; one rank is slow."""

    def run(path: str) -> None:
        import time

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        shared_files._BAND_BYTES = 4096
        mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
        state = {
            f"w{number}": DTensor.from_local(
                (torch.arange(300 * 60.0).view(300, 60) + number).chunk(3, 1)[rank].contiguous(), mesh, [Shard(1)]
            )
            for number in range(4)
        }
        if rank == 1:
            put = gathering.Gathering._put

            def slowly(*arguments: Any) -> None:
                time.sleep(0.002)
                put(*arguments)

            gathering.Gathering._put = slowly  # type: ignore[method-assign]
        try:
            save_safetensors(state, path)
        finally:
            shared_files._BAND_BYTES = 4 << 20
            if rank == 1:
                gathering.Gathering._put = put  # type: ignore[method-assign]

    ranks.run(3, run, str(tmp_path))
    for number in range(4):
        assert torch.equal(exported(tmp_path)[f"w{number}"], torch.arange(300 * 60.0).view(300, 60) + number)


def test_objects_are_uploaded_by_one_rank_each(ranks: Any, tmp_path: Path) -> None:
    """A store that neither writes ranges nor renames: new names each time, and the older objects are removed."""

    def run(path: str) -> None:
        from dcp_format.export import safetensors_writer
        from dcp_io import LocalStore

        class Objects:
            """A store with the required methods alone."""

            writes_ranges = False

            def __init__(self, place: Any) -> None:
                self._store = LocalStore(place)

            def __getattr__(self, name: str) -> Any:
                if name in {"create_sized", "open_sized", "path"}:
                    raise AssertionError(name)
                return getattr(self._store, name)

        kept = safetensors_writer.open_store
        safetensors_writer.open_store = Objects  # type: ignore[assignment]
        try:
            for version, limit in enumerate([10**9, 200, 100], 1):
                export(path, version, max_file_bytes=limit)
        finally:
            safetensors_writer.open_store = kept

    ranks.run(2, run, str(tmp_path))
    assert same(exported(tmp_path), whole(3))
    named = {*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
    assert {*os.listdir(tmp_path)} == {INDEX, *named}
    assert len(named) > 2


@pytest.mark.parametrize("kind", [BlockTensor, MethodTensor])
@pytest.mark.parametrize("hugging_face", [False, True])
def test_files_hold_the_values_of_wrapper_tensors(kind: Any, hugging_face: bool, tmp_path: Path) -> None:
    tensor = kind.of(torch.randn(8, 4))
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        if hugging_face:
            save({"w": tensor}, storage_writer=HuggingFaceStorageWriter(tmp_path))
        else:
            save_safetensors({"w": tensor}, tmp_path)
    found = load_file(next(tmp_path.glob("*.safetensors")))["w"]
    assert found.dtype is tensor.dtype
    assert torch.equal(found, tensor.dequantize())
