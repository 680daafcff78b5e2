"""Staging from CUDA devices: pinned memory, streams beside the one that computes."""

from __future__ import annotations

import pytest
import torch

from dcp_async import AsyncSaver, AsyncSaveResponse, DefaultStager, StagingOptions
from dcp_async.staging.arenas import Arena
from dcp_core import load
from dcp_core.testing.memory import MemoryReader, MemoryWriter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shared", [False, True])
def test_arenas_are_pinned(shared: bool) -> None:
    torch.ones(1, device="cuda")
    arena = Arena(shared=shared, pinned=True)
    arena.reserve(1 << 20)
    assert arena.view().is_pinned()
    arena.close()


def test_values_at_the_call_while_the_device_computes() -> None:
    """The copy waits for earlier work on the current stream, and later work does not wait for the copy."""
    weight = torch.zeros(1 << 24, device="cuda")
    other = torch.randn(2048, 2048, device="cuda")
    with AsyncSaver("thread") as saver:
        for step in range(1, 4):
            for _ in range(50):
                other = torch.tanh(other @ other)
            weight.add_(1)
            future = saver.save({"w": weight, "column": weight[::2], "step": step}, storage_writer=MemoryWriter("cuda"))
            weight.add_(100)
            future.result()  # type: ignore[union-attr]
            weight.sub_(100)
            found = {"w": torch.zeros(1 << 24), "column": torch.zeros(1 << 23), "step": 0}
            load(found, storage_reader=MemoryReader("cuda"))
            assert found["step"] == step
            assert (found["w"] == step).all()  # type: ignore[attr-defined]
            assert (found["column"] == step).all()  # type: ignore[attr-defined]


def test_staging_beside_computing() -> None:
    weight = torch.ones(1 << 22, device="cuda")
    stager = DefaultStager(StagingOptions())
    staged = stager.stage({"w": weight, "view": weight[10:20]})
    assert not isinstance(staged, dict)
    found = staged.result()
    assert found["w"].is_pinned()
    assert found["view"].data_ptr() == found["w"].data_ptr() + 40
    del found, staged
    stager.close()


def test_the_copy_runs_beside_what_the_device_computes() -> None:
    """`save` returns while the device is still busy, and work queued after it does not wait for the copy."""
    weight = torch.ones(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with AsyncSaver("thread") as saver:
        saver.warm_up(state_dict={"w": weight})
        busy = torch.cuda.Event()
        torch.cuda._sleep(15_000_000_000)
        busy.record()
        answer = saver.save({"w": weight}, storage_writer=MemoryWriter("cuda"), async_stager=DefaultStager())
        assert isinstance(answer, AsyncSaveResponse)
        assert not busy.query(), "save waited for the device"
        assert not answer.staging_completion.done(), "the copy did not wait for what came before it"
        with saver.lock():
            assert busy.query()
            weight.add_(1)
        answer.upload_completion.result()
    found = {"w": torch.zeros(1 << 24)}
    load(found, storage_reader=MemoryReader("cuda"))
    assert (found["w"] == 1).all()
