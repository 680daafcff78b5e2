"""Values of every kind on a device, through every kind of save and back, whatever the stream that computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from dcp_async import AsyncSaver, SaverOptions
from dcp_core import DefaultSavePlanner, DivergentReplicaWarning, load, save
from dcp_core.planning.replicas import replica_digests
from dcp_core.storage import storage_writer
from dcp_format import SafetensorsWriter
from dcp_ranks.choose_coordinator import assume_job_size
from dcp_state import app_state
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor

pytestmark = pytest.mark.device
safetensors = pytest.importorskip("safetensors.torch")

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.uint16, torch.uint8, torch.bool),
]


def numbers(dtype: torch.dtype, count: int = 60_000) -> torch.Tensor:
    return (torch.arange(count) % 61).to(torch.float32).to(dtype)


def views(device: str) -> dict[str, torch.Tensor]:
    """Tensors on the device: of all dtypes, strided, overlapping, empty, a scalar, one in host memory.

    None is conjugated lazily: PyTorch's kernel for it crashes in operators that are written in Python.
    """
    state = {str(dtype).removeprefix("torch."): numbers(dtype).to(device) for dtype in DTYPES}
    whole = state["float32"]
    return state | {
        "columns": whole.view(300, 200).t(),
        "part": whole[100:-100],
        "rows": whole.view(300, 200)[::3],
        "expanded": whole[:1].expand(50_000),
        "empty": whole[:0],
        "scalar": whole[7],
        "host": torch.arange(5),
    }


@pytest.fixture
def computed(device: str) -> Iterator[dict[str, torch.Tensor]]:
    """The views, whose numbers a stream of their own has still to double."""
    module = torch.get_device_module(device)
    state = views(device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        state["float32"].mul_(2)
        state["complex64"].mul_(2)
        yield state


def expected() -> dict[str, torch.Tensor]:
    state = views("cpu")
    state["float32"].mul_(2)
    state["complex64"].mul_(2)
    return state


def save_now(state: dict[str, Any], folder: Path) -> None:
    save(state, checkpoint_id=folder)


def save_compressed(state: dict[str, Any], folder: Path) -> None:
    from dcp_fs import FileSystemWriter

    save(state, storage_writer=FileSystemWriter(folder, compression="auto"))


def save_later(kind: str, **options: Any) -> Callable[[dict[str, Any], Path], None]:
    def save_with(state: dict[str, Any], folder: Path) -> None:
        with AsyncSaver(kind, options=SaverOptions(**options)) as saver:
            future = saver.save(state, checkpoint_id=folder)
            for name in ("float32", "complex64"):
                state[name].zero_()
            future.result()  # type: ignore[union-attr]

    return save_with


SAVES = {
    "save": save_now,
    "compressed": save_compressed,
    "thread": save_later("thread"),
    "process": save_later("process"),
    "waves": save_later("process", staging="waves", max_staging_bytes=2 << 20),
    "pageable": save_later("thread", pin_memory=False),
}


@pytest.mark.parametrize("how", SAVES)
def test_all_values_come_back(computed: dict[str, torch.Tensor], tmp_path: Path, how: str) -> None:
    SAVES[how](computed, tmp_path)
    wanted = expected()
    on_host = {name: torch.zeros_like(value) for name, value in wanted.items()}
    on_device = {name: torch.zeros_like(value, device=computed["uint8"].device) for name, value in wanted.items()}
    for template in (on_host, on_device):
        load(template, checkpoint_id=tmp_path)
        for name, value in wanted.items():
            assert torch.equal(bits(template[name].cpu()), bits(value)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_replicas_are_compared_as_in_host_memory(computed: dict[str, torch.Tensor], device: str) -> None:
    """Small and large tensors, strided ones included, and those that the current stream has yet to compute."""
    on_host = expected()
    wanted = replica_digests([*on_host.values()], everything=False)
    assert None not in wanted
    torch.get_device_module(device).current_stream().synchronize()
    for everything in (False, True):
        expected_digests = wanted if not everything else replica_digests([*on_host.values()], everything=True)
        assert replica_digests([*computed.values()], everything=everything) == expected_digests
    for name, value in computed.items():
        if value.numel() and value.device.type == device:
            value.fill_(3 if value.dtype is not torch.bool else False)
            assert replica_digests([value], everything=False) != replica_digests([on_host[name]], everything=False)


def test_replicas_on_the_device_that_differ(device: str) -> None:
    plans = []
    with assume_job_size(2), torch.serialization.safe_globals(WRAPPER_GLOBALS):
        for rank in range(2):
            planner = DefaultSavePlanner()
            large = torch.full((60_000,), float(rank), device=device)
            state = {"large": large, "wrapper": BlockTensor.of(large), "small": large[:3], "same": large * 0}
            planner.set_up_planner(state | {"object": (large, 1)})
            plans.append(planner.create_local_plan())
    with pytest.warns(DivergentReplicaWarning, match=r"4 value\(s\) differ.*'large' on ranks \[1\]"):
        planner.create_global_plan(plans)


def test_exported_files_have_the_values(computed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    names = ("float32", "bfloat16", "columns", "rows", "host")
    save({name: computed[name] for name in names}, storage_writer=SafetensorsWriter(tmp_path))
    found: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= safetensors.load_file(file)
    wanted = expected()
    assert {name: torch.equal(found[name], wanted[name]) for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_tensor_that_reports_another_dtype(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, guarded: bool
) -> None:
    """A quantized tensor in the form of torchao's: its dtype is that of its values, its memory holds codes."""
    values = torch.linspace(-1, 1, 4096).to(device)
    state = {"weight": BlockTensor.of(values)}
    template = {"weight": BlockTensor.of(torch.zeros(4096).to(device))}
    if not guarded:  # the tensor is saved by its dtype and its memory, of which it has none
        monkeypatch.setattr(storage_writer, "is_wrapper", lambda _: False)
        safe = torch.serialization.safe_globals(WRAPPER_GLOBALS)
        with safe, pytest.raises(NotImplementedError, match="of BlockTensor"):
            save(state, checkpoint_id=tmp_path)
        return
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        save(state, checkpoint_id=tmp_path)
        load(template, checkpoint_id=tmp_path)
    assert torch.equal(template["weight"].codes.cpu(), state["weight"].codes.cpu())
    assert template["weight"].codes.device.type == torch.device(device).type


@pytest.fixture
def mesh(device: str, device_backend: str) -> Iterator[DeviceMesh]:
    torch.get_device_module(device).set_device(0)  # before the mesh, which else warns that it chooses one
    dist.init_process_group(device_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh(device, [0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_sharded_tensors(mesh: DeviceMesh, tmp_path: Path, kind: str) -> None:
    def sharded(values: torch.Tensor) -> DTensor:
        return DTensor.from_local(values.to(mesh.device_type), mesh, [Shard(0)], run_check=False)

    values = numbers(torch.float32)
    with AsyncSaver(kind) as saver:
        saver.save({"weight": sharded(values)}, checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
    template = {"weight": sharded(torch.zeros(60_000))}
    load(template, checkpoint_id=tmp_path)
    assert torch.equal(template["weight"].to_local().cpu(), values)


def test_fsdp2(mesh: DeviceMesh, tmp_path: Path) -> None:
    def sharded(value: float) -> Any:
        net = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(net.weight, value)
        return fully_shard(net.to(mesh.device_type), mesh=mesh)

    save({"app": app_state(sharded(3.0))}, checkpoint_id=tmp_path)
    net = sharded(4.0)
    load({"app": app_state(net)}, checkpoint_id=tmp_path)
    assert (net.weight.to_local().cpu() == 3).all()
    net(torch.ones(2, 8, device=mesh.device_type)).sum().backward()
    assert (net.weight.grad.to_local().cpu() == 2).all()
