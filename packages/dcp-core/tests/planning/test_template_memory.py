from __future__ import annotations

import copy
import mmap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_core import DefaultLoadPlanner, LoadMismatchError, load, save
from dcp_core.planning.read_items import find_shared_memory
from integration_tests.kits.memory import MemoryReader, MemoryWriter


@pytest.fixture
def put() -> Callable[[dict[str, Any]], MemoryReader]:
    def save_it(state: dict[str, Any]) -> MemoryReader:
        folder = uuid.uuid4().hex
        save(state, storage_writer=MemoryWriter(folder))
        return MemoryReader(folder)

    return save_it


@given(st.data())
def test_shared_elements_are_found_exactly(data: st.DataObject) -> None:
    """Against the sets of elements of random views of one buffer."""
    buffer = torch.arange(24)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        strides = [data.draw(st.integers(0, 4)) for _ in shape]
        reach = sum(max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        views.append(buffer.as_strided(shape, strides, data.draw(st.integers(0, max(0, 23 - reach)))))
    names = [str(number) for number in range(len(views))]
    elements = [view.flatten().tolist() for view in views]
    found = find_shared_memory(names, views)
    pairs = {
        (one, other)
        for one in range(len(views))
        for other in range(one + 1, len(views))
        if {*elements[one]} & {*elements[other]}
    }
    assert set(found.shared) == pairs
    refused = {problem.key for problem in found.problems}
    doubled = {name for name, own in zip(names, elements, strict=True) if len(own) != len(set(own))}
    assert refused <= doubled  # some windows that overlap are not told from others
    assert {name for name, view in zip(names, views, strict=True) if 0 in view.stride() and name in doubled} <= refused


@pytest.mark.parametrize(
    "template", [torch.zeros(1).expand(3), torch.zeros(3)[:1].expand(3), torch.zeros(4).unfold(0, 2, 1)]
)
def test_elements_that_share_memory_are_refused_with_the_key(template, put) -> None:
    reader = put({"fine": torch.ones(2), "twice": torch.arange(float(template.numel())).reshape(template.shape)})
    fine = torch.zeros(2)
    with pytest.raises(LoadMismatchError, match="'twice': several elements of the template") as caught:
        load({"fine": fine, "twice": template}, storage_reader=reader)
    assert [(problem.key, problem.kind) for problem in caught.value.problems] == [("twice", "memory")]
    assert fine.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch says it once a process
@pytest.mark.parametrize("cut", [slice(None), slice(0, 4, 2)], ids=["in a row", "strided"])
def test_memory_mapped_read_only_is_refused_with_the_key(tmp_path: Path, put, cut) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ)
    template = torch.frombuffer(mapped, dtype=torch.float32, count=4)[cut]
    reader = put({"w": torch.ones(len(template)), "n": 1})
    state = {"w": template, "n": 0}
    with pytest.raises(LoadMismatchError, match="'w': the memory of the template's tensor is mapped read-only"):
        load(state, storage_reader=reader)
    assert state["n"] == 0
    load({"w": template.clone(), "n": 0}, storage_reader=reader)


def test_overlapping_tensors_are_reported(put) -> None:
    buffer = torch.zeros(4)
    reader = put({"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": torch.ones(2)})
    with pytest.warns(UserWarning, match="overwritten a part of the other: 'a' and 'b'") as caught:
        report = load({"a": buffer[:3], "b": buffer[1:], "c": torch.zeros(2)}, storage_reader=reader)
    assert len(caught) == 1
    assert report.overlapping == (("a", "b"),)
    assert "1 overlapping: a and b" in report.summary()


def quantized_views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    quantized = torch.quantize_per_tensor(flat.nan_to_num(), 0.5, 3, torch.qint8)
    return {"a": quantized[:8], "b": quantized[4:]}


VIEWS: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "a buffer and its parts": lambda flat: {"flat": flat, "a": flat[:6], "b": flat[6:].view(2, 3)},
    "windows": lambda flat: {"a": flat[:8], "b": flat[4:]},
    "another dtype": lambda flat: {"a": flat, "b": flat.view(torch.int32)},
    "another shape": lambda flat: {"a": flat, "b": flat.view(3, 4).t()},
    "rows and columns": lambda flat: {"rows": flat.view(3, 4)[1], "columns": flat.view(3, 4)[:, 1]},
    "parameters": lambda flat: {"a": torch.nn.Parameter(flat), "b": torch.nn.Parameter(flat[2:])},
    "quantized": quantized_views,
    "in a container": lambda flat: {"a": [flat[:8], 1], "b": {"c": flat[4:]}},  # type: ignore[dict-item]
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage is:UserWarning")
@pytest.mark.parametrize("kind", VIEWS)
def test_views_that_overlap_warn_only_if_a_value_was_lost(tmp_path: Path, kind: str) -> None:
    stored = torch.arange(12.0)
    stored[5] = torch.nan
    save(VIEWS[kind](stored), checkpoint_id=tmp_path)
    memory = torch.zeros(12)
    report = load(VIEWS[kind](memory), checkpoint_id=tmp_path)  # warnings are errors
    assert report.overlapping
    names = [*VIEWS[kind](stored)]
    apart = {name: copy.deepcopy(value) for name, value in VIEWS[kind](torch.full((12,), 7.0)).items()}
    save({**VIEWS[kind](stored), names[-1]: apart[names[-1]]}, checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match="share memory in the template and differ in the checkpoint") as caught:
        load(VIEWS[kind](memory), checkpoint_id=tmp_path)
    assert len(caught) == 1
    assert f"'{names[-1]}" in str(caught[0].message)


def test_readers_that_may_read_with_other_ranks_are_called_once() -> None:
    calls = []

    class Reader(MemoryReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            calls.append(plan)  # another reader would broadcast
            return super().read_data(plan, planner)

    folder = uuid.uuid4().hex
    save({"a": torch.ones(3), "b": torch.zeros(3)}, storage_writer=MemoryWriter(folder))
    buffer = torch.zeros(4)
    assert load({"a": buffer[:3], "b": buffer[1:]}, storage_reader=Reader(folder)).overlapping
    assert len(calls) == 1


@pytest.mark.parametrize("size", [3, 300_000])  # large tensors are read into their memory at the same time
def test_a_tie_of_different_values_is_refused_and_not_called_damaged(tmp_path: Path, size: int) -> None:
    shared = torch.zeros(size)
    save({"head": torch.ones(size), "embedding": torch.full((size,), 2.0)}, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match="'head' and 'embedding' share memory in the template") as caught:
        load({"head": shared, "embedding": shared}, checkpoint_id=tmp_path)
    assert [(problem.key, problem.kind) for problem in caught.value.problems] == [("embedding", "tie")]
    load({"head": shared}, checkpoint_id=tmp_path)
    assert shared.unique().tolist() == [1]


def test_tensors_that_overlap_in_part_are_not_called_damaged(tmp_path: Path) -> None:
    size, kept = 300_000, 100
    save({"a": torch.ones(size), "b": torch.full((size,), 2.0)}, checkpoint_id=tmp_path)
    for _ in range(60):  # one in six failed its checksum when both were read into the memory at the same time
        buffer = torch.zeros(size + kept)
        with pytest.warns(UserWarning, match="'a' and 'b'"):
            report = load({"a": buffer[:size], "b": buffer[kept:]}, checkpoint_id=tmp_path)
        assert report.overlapping == (("a", "b"),)
        assert (buffer[:kept].unique().tolist(), buffer[size:].unique().tolist()) == ([1], [2])


def test_a_tie_that_the_checkpoint_may_not_have_is_reported(put) -> None:
    shared = torch.zeros(3)
    reader = put({"head": torch.ones(3), "embedding": torch.ones(3, dtype=torch.float16)})
    report = load({"head": shared, "embedding": shared}, storage_reader=reader)
    assert [{*pair} for pair in report.overlapping] == [{"head", "embedding"}]


@pytest.mark.parametrize("tied", [False, True])
def test_a_tie_of_equal_values_is_none_of_them(put, *, tied: bool) -> None:
    shared, stored = torch.zeros(3), torch.ones(3)
    reader = put({"head": stored, "embedding": stored if tied else stored.clone(), "other": torch.zeros(3)})
    report = load({"head": shared, "embedding": shared, "other": torch.ones(3)}, storage_reader=reader)
    assert report.overlapping == ()
    assert shared.tolist() == [1, 1, 1]


def test_renamed_keys_of_one_stored_tensor_may_share_memory(put) -> None:
    shared = torch.zeros(3)
    planner = DefaultLoadPlanner(rename={"copy": "w"})
    report = load({"w": shared, "copy": shared}, storage_reader=put({"w": torch.ones(3)}), planner=planner)
    assert report.overlapping == ()


def test_thousands_of_columns_of_one_matrix_take_no_time(put) -> None:
    matrix = torch.zeros(4, 3000)
    keys = [str(column) for column in range(3000)]
    found = find_shared_memory(keys, [matrix[:, column] for column in range(3000)])
    assert found.problems == found.shared == []


@pytest.mark.parametrize("shape", [(3,), (), (2, 2)])
@pytest.mark.parametrize("strided", [False, True])
def test_autograd_sees_that_values_have_changed(put, shape: tuple[int, ...], *, strided: bool) -> None:
    parameter = torch.zeros(shape, requires_grad=True)
    if strided and shape:
        parameter = torch.zeros(*shape, 2)[..., 0].detach().requires_grad_()
    loss = (parameter * parameter).sum()
    load({"w": parameter}, storage_reader=put({"w": torch.ones(shape)}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert parameter.is_leaf
    assert parameter.eq(1).all()


def test_tensors_made_in_inference_mode_are_filled(put) -> None:
    with torch.inference_mode():
        template = torch.zeros(3)
    load({"w": template}, storage_reader=put({"w": torch.ones(3)}))
    assert template.tolist() == [1, 1, 1]
