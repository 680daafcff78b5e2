"""Staging from devices: pinned memory, streams beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcp_async import AsyncSaver, AsyncSaveResponse, DefaultStager, StagingOptions
from dcp_async.staging.arenas import Arena
from dcp_core import load
from integration_tests.devices import pretend
from integration_tests.kits.memory import MemoryReader, MemoryWriter

pytestmark = pytest.mark.device


def keep_busy(device: str) -> Callable[[], None]:
    """Let the device compute until the returned function is called, or for some seconds."""
    if device == pretend.NAME:
        return pretend.hold().release
    torch.cuda._sleep(15_000_000_000)
    return lambda: None


@pytest.mark.parametrize("shared", [False, True])
def test_arenas_are_pinned(device: str, shared: bool) -> None:
    torch.ones(1, device=device)
    arena = Arena(shared=shared, pinned=True)
    arena.reserve(1 << 20)
    assert arena.view().is_pinned()
    arena.close()


def test_values_at_the_call_while_the_device_computes(device: str) -> None:
    """The copy waits for earlier work on the current stream, and later work does not wait for the copy."""
    weight = torch.zeros(1 << 20, device=device)
    other = torch.randn(64, 64, device=device)
    with AsyncSaver("thread") as saver:
        for step in range(1, 4):
            for _ in range(20):
                other = torch.tanh(other @ other)
            weight.add_(1)
            future = saver.save(
                {"w": weight, "column": weight[::2], "step": step}, storage_writer=MemoryWriter("device")
            )
            weight.add_(100)
            future.result()  # type: ignore[union-attr]
            weight.sub_(100)
            found = {"w": torch.zeros(1 << 20), "column": torch.zeros(1 << 19), "step": 0}
            load(found, storage_reader=MemoryReader("device"))
            assert found["step"] == step
            assert (found["w"] == step).all()  # type: ignore[attr-defined]
            assert (found["column"] == step).all()  # type: ignore[attr-defined]


def test_staging_beside_computing(device: str) -> None:
    weight = torch.ones(1 << 22, device=device)
    stager = DefaultStager(StagingOptions())
    staged = stager.stage({"w": weight, "view": weight[10:20]})
    assert not isinstance(staged, dict)
    found = staged.result()
    assert found["w"].is_pinned()
    assert found["view"].data_ptr() == found["w"].data_ptr() + 40
    del found, staged
    stager.close()


def test_the_copy_runs_beside_what_the_device_computes(device: str) -> None:
    """`save` returns while the device is still busy, and work queued after it does not wait for the copy."""
    weight = torch.ones(1 << 20, device=device)
    module = torch.get_device_module(device)
    module.synchronize()
    with AsyncSaver("thread") as saver:
        saver.warm_up(state_dict={"w": weight})
        go_on = keep_busy(device)
        busy = module.Event()
        busy.record()
        answer = saver.save({"w": weight}, storage_writer=MemoryWriter("device"), async_stager=DefaultStager())
        assert isinstance(answer, AsyncSaveResponse)
        assert not busy.query(), "save waited for the device"
        assert not answer.staging_completion.done(), "the copy did not wait for what came before it"
        go_on()
        with saver.lock():
            assert busy.query()
            weight.add_(1)
        answer.upload_completion.result()
    found = {"w": torch.zeros(1 << 20)}
    load(found, storage_reader=MemoryReader("device"))
    assert (found["w"] == 1).all()
