"""`save` and `load` in one process over storage in memory: options and extension points of the default planners."""

import collections
import io
import uuid
from typing import Any

import pytest
import torch

from dcp_core import (
    CheckpointNotFoundError,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    LoadMismatchError,
    LoadReport,
    Metadata,
    MetadataIndex,
    PlanError,
    ReadItem,
    UnsafeCheckpointError,
    UnsupportedValueError,
    WriteItem,
    load,
    load_keys,
    load_state_dict,
    save,
    save_state_dict,
)
from dcp_core.errors import PluginNotFoundError
from dcp_core.objects.object_bytes import UnloadableObjectWarning
from integration_tests.kits.memory import MemoryReader, MemoryWriter, files_in


@pytest.fixture
def folder() -> str:
    return uuid.uuid4().hex


def put(folder: str, state_dict: dict[str, Any], planner: DefaultSavePlanner | None = None) -> Metadata:
    return save(state_dict, storage_writer=MemoryWriter(folder), planner=planner)


def get(folder: str, state_dict: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> LoadReport:
    return load(state_dict, storage_reader=MemoryReader(folder), planner=planner)


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.seen: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "t": torch.full((2,), float(self.count))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen.append(state_dict)
        self.count = state_dict["count"]


class Odd:
    pass


def test_fills_the_template_in_place(folder: str) -> None:
    put(folder, {"model": {"w": torch.arange(6.0).reshape(2, 3), "steps": [1, 2]}, "n": 3})
    target = torch.zeros(2, 3)
    template = {"model": {"w": target, "steps": None}, "n": 0}
    report = get(folder, template)
    assert template["model"]["w"] is target
    assert torch.equal(target, torch.arange(6.0).reshape(2, 3))
    assert (template["model"]["steps"], template["n"]) == ([1, 2], 3)
    assert report.loaded == ("model.steps", "model.w", "n")
    assert report.bytes_read > 0


def test_containers_of_the_template_keep_type_keys_and_empties(folder: str) -> None:
    # A stock load leaves both 5 and "5", drops empty dicts, and turns an OrderedDict into a dict.
    put(folder, {"n": {5: torch.ones(1), 6: "six"}, "o": collections.OrderedDict(a=1), "e": {}, 7: "top"})
    template = {"n": {5: torch.zeros(1), 6: ""}, "o": collections.OrderedDict(a=0), "e": {}, 7: ""}
    get(folder, template)
    assert template["n"] == {5: torch.ones(1), 6: "six"}
    assert type(template["o"]) is collections.OrderedDict
    assert template == {"n": {5: torch.ones(1), 6: "six"}, "o": {"a": 1}, "e": {}, 7: "top"}


def test_mixed_top_level_keys_load(folder: str) -> None:
    put(folder, {1: torch.ones(2), "a": torch.ones(3)})
    template = {1: torch.zeros(2), "a": torch.zeros(3)}
    get(folder, template)
    assert torch.equal(template[1], torch.ones(2))


def test_without_flattening(folder: str) -> None:
    put(folder, {"a": torch.ones(2), "b": {"c": 1}}, DefaultSavePlanner(flatten_state_dict=False))
    template: dict[str, Any] = {"a": torch.zeros(2), "b": None}
    get(folder, template, DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(template["a"], torch.ones(2))
    assert template["b"] == {"c": 1}


def test_stateful_values_give_and_take_their_state(folder: str) -> None:
    put(folder, {"counter": Counter(4)})
    counter = Counter()
    template = {"counter": counter}
    get(folder, template)
    assert template["counter"] is counter
    assert counter.count == 4
    assert torch.equal(counter.seen[0]["t"], torch.full((2,), 4.0))


def test_every_misfit_is_reported_at_once(folder: str) -> None:
    ones = torch.ones(2)
    put(folder, {"layers.0.w": ones, "shape": ones.clone(), "kind": ones.clone(), "cast": ones.clone(), "o": 1})
    template = {
        "layer.0.w": torch.ones(2), "shape": torch.ones(3), "kind": 1,
        "cast": torch.ones(2, dtype=torch.int64), "o": torch.ones(1),
    }  # fmt: skip
    with pytest.raises(LoadMismatchError) as caught:
        get(folder, template)
    assert {problem.key: problem.kind for problem in caught.value.problems} == {
        "layer.0.w": "missing", "shape": "shape", "kind": "kind", "cast": "cast", "o": "kind",
    }  # fmt: skip
    assert "did you mean 'layers.0.w'?" in str(caught.value)
    assert torch.equal(template["layer.0.w"], torch.ones(2))


def test_partial_load_says_what_it_left(folder: str) -> None:
    put(folder, {"a": torch.ones(2), "extra": torch.ones(1)})
    template = {"a": torch.zeros(2), "b": torch.full((2,), 5.0)}
    report = get(folder, template, DefaultLoadPlanner(allow_partial_load=True))
    assert (report.loaded, report.missing, report.unexpected) == (("a",), ("b",), ("extra",))
    assert torch.equal(template["b"], torch.full((2,), 5.0))


def test_lossless_casts_are_done_and_reported_lossy_ones_asked_for(folder: str) -> None:
    put(folder, {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.full((2,), 1.5)})
    template = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(LoadMismatchError, match="allow_lossy_casts"):
        get(folder, template)
    report = get(folder, template, DefaultLoadPlanner(allow_lossy_casts=True))
    assert report.cast == {"a": ("bfloat16", "float32"), "b": ("float32", "int64")}
    assert torch.equal(template["a"], torch.ones(2))


def test_missing_chunks_are_found_before_anything_changes(folder: str) -> None:
    put(folder, {"a": torch.ones(4), "b": torch.ones(2)})
    reader = MemoryReader(folder)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata["a"]
    entry.chunks[0].sizes = torch.Size((3,))  # type: ignore[union-attr]
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"a": torch.zeros(4), "b": torch.zeros(2)}, metadata)
    with pytest.raises(LoadMismatchError, match=r"'a': the checkpoint has no data for \[3:4\]"):
        planner.create_local_plan()


def test_meta_targets_get_memory(folder: str) -> None:
    put(folder, {"m": {"w": torch.ones(3)}, "l": [torch.ones(2)]})
    template = {"m": {"w": torch.empty(3, device="meta")}, "l": [torch.empty(2, device="meta")]}
    get(folder, template)
    assert torch.equal(template["m"]["w"], torch.ones(3))
    assert torch.equal(template["l"][0], torch.ones(2))


def test_views_are_filled_through(folder: str) -> None:
    put(folder, {"a": torch.arange(6.0).reshape(2, 3)})
    base = torch.zeros(3, 2)
    get(folder, {"a": base.t()})
    assert torch.equal(base.t(), torch.arange(6.0).reshape(2, 3))


def test_tied_values_are_stored_once(folder: str) -> None:
    table = torch.ones(1000)
    put(folder, {"embedding": table, "head": table})
    (name,) = [name for name in files_in(folder) if name.endswith(".distcp")]
    assert len(files_in(folder)[name]) < 2 * 4000
    template = {"embedding": torch.zeros(1000), "head": torch.zeros(1000)}
    get(folder, template)
    assert torch.equal(template["head"], table)


def test_ties_are_off_where_a_subclass_changes_data(folder: str) -> None:
    class ByName(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            data = super().resolve_data(write_item)
            return data * 2 if write_item.index.fqn == "head" else data  # type: ignore[operator]

    table = torch.ones(3)
    put(folder, {"embedding": table, "head": table}, ByName())
    assert torch.equal(load_keys(storage_reader=MemoryReader(folder))["head"], torch.full((3,), 2.0))


def test_transforms_and_look_ups_can_be_overridden(folder: str) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self):  # type: ignore[no-untyped-def]
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
            data = super().transform_object(write_item, object)
            return data.half() if isinstance(data, torch.Tensor) else data

    class Doubled(DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            found[index.fqn] = True
            return super().lookup_tensor(index)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            tensor.mul_(2)

    found: dict[str, bool] = {}
    put(folder, {"a": torch.ones(4), "o": 1}, Half())
    template = {"a": torch.zeros(4), "o": 0}
    report = get(folder, template, Doubled())
    assert report.cast == {"a": ("float16", "float32")}
    assert torch.equal(template["a"], torch.full((4,), 2.0))
    assert found == {"a": True}


def test_conversion_that_the_plan_does_not_mention_loads(folder: str) -> None:
    class Quiet(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

    put(folder, {"a": torch.ones(4)}, Quiet())
    template = {"a": torch.zeros(4)}
    get(folder, template)
    assert torch.equal(template["a"], torch.ones(4))


def test_data_of_other_sizes_than_planned_is_refused(folder: str) -> None:
    class Cut(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            return super().resolve_data(write_item)[:1]  # type: ignore[index]

    with pytest.raises(TypeError, match="'a' was planned with sizes"):
        put(folder, {"a": torch.ones(4)}, Cut())
    assert files_in(folder) == {}


def test_part_of_a_checkpoint_without_a_template(folder: str) -> None:
    put(folder, {"model": {"w": torch.ones(2), "b": [torch.ones(1), 5]}, "opt": {3: {"lr": 0.1}}, "step": 9})
    whole = load_keys(storage_reader=MemoryReader(folder))
    assert whole["opt"] == {3: {"lr": 0.1}}
    assert whole["model"]["b"][1] == 5
    assert load_keys("step", storage_reader=MemoryReader(folder)) == {"step": 9}
    assert list(load_keys(["model.b"], storage_reader=MemoryReader(folder))["model"]) == ["b"]
    with pytest.raises(KeyError, match=r"'mode'.*did you mean 'model'"):
        load_keys("mode", storage_reader=MemoryReader(folder))


def test_empty_template_planner_wants_an_empty_template(folder: str) -> None:
    put(folder, {"a": 1})
    with pytest.raises(ValueError, match="empty"):
        get(folder, {"a": 0}, EmptyStateDictLoadPlanner())


def test_objects_that_would_not_load_back_are_named_at_save(folder: str) -> None:
    with pytest.warns(UnloadableObjectWarning, match="'odd'"):
        put(folder, {"odd": Odd()})
    with pytest.raises(UnsafeCheckpointError, match="'odd'"):
        get(folder, {"odd": None})
    template = {"odd": None}
    get(folder, template, DefaultLoadPlanner(allow_globals=[Odd]))
    assert isinstance(template["odd"], Odd)
    with pytest.raises(TypeError, match="'odd'"):
        put(folder, {"odd": Odd()}, DefaultSavePlanner(strict_objects=True))


@pytest.mark.parametrize(
    "value",
    [torch.ones(1, device="meta"), torch.ones(2, 2).to_sparse(), lambda: None],
    ids=["meta", "sparse", "lambda"],
)
def test_values_that_cannot_be_saved_fail_before_anything_is_written(folder: str, value: object) -> None:
    put(folder, {"a": torch.ones(1)})
    before = files_in(folder)
    with pytest.raises(UnsupportedValueError, match="'bad'"):
        put(folder, {"a": torch.zeros(1), "bad": value})
    assert files_in(folder) == before


def test_nothing_to_load_from(folder: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        get(folder, {"a": torch.ones(1)})
    with pytest.raises(PluginNotFoundError, match="checkpoint_id"):
        load({"a": torch.ones(1)})
    with pytest.raises(PluginNotFoundError, match="checkpoint_id"):
        save({"a": torch.ones(1)})


def test_deprecated_functions_still_work(folder: str) -> None:
    with pytest.warns(FutureWarning):
        save_state_dict({"a": torch.ones(2)}, MemoryWriter(folder))
    template = {"a": torch.zeros(2)}
    with pytest.warns(FutureWarning):
        load_state_dict(template, MemoryReader(folder))
    assert torch.equal(template["a"], torch.ones(2))


def test_clashing_names_are_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"'a\.b'"):
        put(folder, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="replicas"):
        DefaultSavePlanner(replicas="perhaps")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="dedup_replicated_tensors"):
        DefaultSavePlanner(dedup_replicated_tensors=True)


def test_flaws_of_plans_reach_the_caller(folder: str) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self):  # type: ignore[no-untyped-def]
            plan = super().create_local_plan()
            plan.items[0].tensor_data.chunk.sizes = torch.Size((1,))
            return plan

    with pytest.raises(PlanError, match="no rank holds"):
        put(folder, {"a": torch.ones(4)}, Half())


def test_local_plans_are_in_the_order_of_the_state_dict() -> None:
    state = {"z": torch.ones(2), "step": 3, "a": torch.ones(1), "set": {1}, "nested": {"k": 1, "b": torch.zeros(3)}}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    wanted = ["z", "step", "a", "set", "nested.k", "nested.b"]
    assert [item.index.fqn for item in planner.create_local_plan().items] == wanted
    plan = planner.create_local_plan()
    assert [item.index.fqn for item in plan.items] == wanted
    (global_plan,), _ = planner.create_global_plan([plan])
    assert [item.index.fqn for item in global_plan.items] == wanted
