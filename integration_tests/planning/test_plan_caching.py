"""Row 2 of the scenarios: a save of what was saved before sends no plan; one of anything else gets no old one."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_all as dcp
from dcp_all._nested_dict import flatten_state_dict
from dcp_core.planning import even_cuts, plan_exchange, save_planner
from dcp_core.planning.replicas import DivergentReplicaWarning
from dcp_ranks.transport.store_wire import StoreWire

LAYERS = 60


@contextmanager
def traffic() -> Iterator[Counter[str]]:
    """Bytes that this rank sends to the store and gets from it, by the number of the phase."""
    counts: Counter[str] = Counter()
    methods: dict[str, Any] = {name: getattr(StoreWire, name) for name in ("put", "get", "claim", "get_text")}

    def note(key: str, *values: str | bytes) -> None:
        counts[key.partition("/")[0]] += sum(map(len, values)) + len(key)

    def put(self: Any, key: str, data: bytes) -> Any:
        note(key, data)
        return methods["put"](self, key, data)

    def get(self: Any, key: str) -> Any:
        found = methods["get"](self, key)
        note(key, found[0])
        return found

    def claim(self: Any, key: str, text: str) -> Any:
        found = methods["claim"](self, key, text)
        note(key, text, found)
        return found

    def get_text(self: Any, key: str) -> Any:
        found = methods["get_text"](self, key)
        note(key, found)
        return found

    with mock.patch.multiple(StoreWire, put=put, get=get, claim=claim, get_text=get_text):
        yield counts


def shard(mesh: DeviceMesh, rows: int, value: float, dtype: torch.dtype = torch.float32) -> DTensor:
    local = torch.full((rows // mesh.size(), 32), value, dtype=dtype) + mesh.get_local_rank()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def model(mesh: DeviceMesh, value: float, **options: Any) -> dict[str, Any]:
    layers = {
        f"layers.{n}.{name}": shard(mesh, rows, value, **options)
        for n in range(LAYERS)
        for name, rows in (("attention.weight", 2048), ("mlp.weight", 4096))
    }
    norms = {f"layers.{n}.norm.weight": torch.full((32,), value) for n in range(LAYERS)}
    return {"model": {**layers, **norms}, "name": "model"}


def optimizer(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    state = {
        f"layers.{n}.{name}": {"step": torch.tensor(value), "exp_avg": shard(mesh, rows, value)}
        for n in range(LAYERS)
        for name, rows in (("attention.weight", 2048), ("mlp.weight", 4096))
    }
    return {"optimizer": {"state": state, "param_groups": [{"lr": value / 10, "betas": (0.9, 0.95)}]}}


def zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


def loads(folder: str, state: dict[str, Any]) -> bool:
    """Whether the checkpoint holds exactly this."""
    template = zeroed(state)
    dcp.load(template, checkpoint_id=folder)
    flat, expected = flatten_state_dict(template)[0], flatten_state_dict(state)[0]

    def local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    return flat.keys() == expected.keys() and all(
        torch.equal(local(flat[key]), local(value)) if isinstance(value, torch.Tensor) else flat[key] == value
        for key, value in expected.items()
    )


def interleaved(folder: str) -> list[tuple[Counter[str], Counter[str], bool]]:
    """Model and optimizer saved in turn, three times; each with other values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for step in range(3):
        seen = []
        for name, make in (("model", model), ("optimizer", optimizer)):
            with traffic() as counts:
                dcp.save(make(mesh, step + 1.0), checkpoint_id=f"{folder}/{name}")
            seen.append(counts)
        right = loads(f"{folder}/model", model(mesh, step + 1.0))
        found.append((*seen, right and loads(f"{folder}/optimizer", optimizer(mesh, step + 1.0))))
    return found


def in_a_large_job(story: Callable[[str], Any], folder: str) -> Any:
    """The story, with plans as of many ranks: they send first what differs, and are planned per way of cutting."""
    with (
        mock.patch.object(plan_exchange, "MANY_RANKS", 1),
        mock.patch.object(save_planner, "MANY_RANKS", 1),
        mock.patch.object(even_cuts, "_RANKS_PER_FORM", 1),
    ):
        return story(folder)


def plainly(story: Callable[[str], Any], folder: str) -> Any:
    return story(folder)


JOBS = pytest.mark.parametrize("job", [plainly, in_a_large_job])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path has always the same length: the ranks send the path, and pytest's has a number that grows."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_second_identical_save_sends_no_plan(ranks: Any, short_path: Path, record_property: Any) -> None:
    """Row 2: below 1 KB for planning, and 4 bytes for each chunk and each block with a checksum, with a small frame."""
    world = 4
    found = ranks.run(world, interleaved, str(short_path))
    manifests = {name: dcp.FileSystemReader(short_path / name).read_metadata() for name in ("model", "optimizer")}
    for rank, rounds in enumerate(found):
        assert all(right for *_, right in rounds)
        first, *later = rounds
        for which, name in enumerate(("model", "optimizer")):
            chunks = sum(len(getattr(e, "chunks", ())) for e in manifests[name].state_dict_metadata.values())
            for counts in (one[which] for one in later):
                # Phase 0 agrees on what is saved, 1 plans, 2 writes; without a number, the save's own keys.
                planning = sum(bytes_ for phase, bytes_ in counts.items() if phase != "2")
                if rank:
                    assert planning < 1024
                    assert counts["2"] < 4 * chunks + 2048
                    assert first[which]["1"] > 10 * planning
                else:
                    assert planning < 1024 * world
            record_property(f"{name}_rank_{rank}", dict(later[-1][which]))


def test_one_rank_sends_the_form_of_a_large_job(ranks: Any, short_path: Path) -> None:
    """Below 128 ranks, each rank sends its whole plan: more than 10 KB here."""
    for rank, rounds in enumerate(ranks.run(4, in_a_large_job, interleaved, str(short_path))):
        assert all(right for *_, right in rounds)
        for counts in rounds[0][:2]:
            if rank:
                # Phase 1 sends briefs, 2 the form of rank 0 and each rank's part of the global plan.
                assert counts["1"] < 1024
                assert counts["2"] < 4096


def once_more(mesh: DeviceMesh, folder: str, state: dict[str, Any], **options: Any) -> tuple[bool, bool]:
    """Whether a save used a known plan, and whether it saved what it should. Both on the coordinator."""
    planned: list[int] = []
    original = dcp.DefaultSavePlanner.create_global_plan

    def create(self: Any, all_plans: Any) -> Any:
        planned.append(1)
        return original(self, all_plans)

    planner = options.pop("planner", dcp.DefaultSavePlanner)(**options)
    with mock.patch.object(dcp.DefaultSavePlanner, "create_global_plan", create):
        dcp.save(state, checkpoint_id=folder, planner=planner)
    del mesh
    return not planned, loads(folder, state)


def changes(folder: str) -> list[tuple[str, bool, bool]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()

    class Own(dcp.DefaultSavePlanner):
        pass

    def base() -> dict[str, Any]:
        return model(mesh, 1.0)

    def nested(path: tuple[str, ...]) -> dict[str, Any]:
        state = base()
        *most, last = path
        inner = state
        for key in most:
            inner = inner[key]
        inner[last] = torch.ones(3)
        return state

    def on_one_rank() -> dict[str, Any]:
        state = base()
        if rank == 1:
            state["alone"] = torch.ones(5)
        return state

    def replicated() -> dict[str, Any]:
        state = base()
        weight = state["model"]["layers.0.mlp.weight"]
        local = torch.full((4096, 32), 5.0)
        state["model"]["layers.0.mlp.weight"] = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        assert weight.shape == local.shape
        return state

    steps: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any], bool]] = [
        ("first", base, {}, False),
        ("same", base, {}, True),
        ("other values", lambda: model(mesh, 2.0), {}, True),
        ("other dtype", lambda: model(mesh, 1.0, dtype=torch.bfloat16), {}, False),
        ("same name, other path", lambda: nested(("model", "a.b")), {}, False),
        ("same as flat name", lambda: {**base(), "model.a.b": torch.ones(3)}, {}, False),
        ("the first again", base, {}, True),
        ("a value more on one rank", on_one_rank, {}, False),
        ("the same again", on_one_rank, {}, True),
        ("other placement", replicated, {}, False),
        ("other option", base, {"dedup_save_to_lowest_rank": True}, False),
        ("other planner", base, {"planner": Own}, False),
        ("switched off", base, {"enable_plan_caching": False}, False),
        ("still known", base, {}, True),
    ]
    plan_exchange.RANK_PLANS.clear()
    plan_exchange.GLOBAL_PLANS.clear()
    dist.barrier()
    found = []
    for name, make, options, expected in steps:
        known, right = once_more(mesh, folder, make(), **options)
        found.append((name, rank > 0 or known == expected, right))
    return found


@JOBS
def test_whatever_else_changes_is_planned_anew(ranks: Any, tmp_path: Path, job: Any) -> None:
    for rank in ranks.run(2, job, changes, str(tmp_path)):
        assert [(name, True, True) for name, *_ in rank] == rank


def diverging(folder: str) -> tuple[list[str], bool]:
    """A replicated value that is equal for two saves, and then is not."""
    texts = []
    for step in range(4):
        value = float(dist.get_rank()) if step == 2 else 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save({"lr": torch.tensor(value), "other": torch.tensor(2.0)}, checkpoint_id=folder)
        texts.append(" ".join(str(one.message) for one in caught if one.category is DivergentReplicaWarning))
    template = {"lr": torch.tensor(0.0), "other": torch.tensor(0.0)}
    dcp.load(template, checkpoint_id=folder)
    return texts, template == {"lr": torch.tensor(1.0), "other": torch.tensor(2.0)}


@JOBS
def test_values_that_begin_to_differ_are_still_noticed(ranks: Any, tmp_path: Path, job: Any) -> None:
    (texts, right), (silent, also_right) = ranks.run(2, job, diverging, str(tmp_path))
    assert texts[:2] == ["", ""]
    assert "'lr' on ranks [1]" in texts[2]
    assert texts[3] == ""
    assert silent == [""] * 4
    assert right
    assert also_right


def after_failures(folder: str) -> list[bool]:
    """Saves that fail while they write leave nothing that a later one could take for known."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    class Failing(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == 1:
                raise OSError("no")
            return super().write_data(plan, planner)

    plan_exchange.RANK_PLANS.clear()
    found = [once_more(mesh, folder, model(mesh, 1.0))[1]]
    for step in range(2, 4):
        try:
            dcp.save(model(mesh, 9.0), storage_writer=Failing(folder))
        except dcp.CheckpointException:
            found.append(len(plan_exchange.RANK_PLANS) == 0)
        found.append(once_more(mesh, folder, model(mesh, float(step)))[1])
    return found


@JOBS
def test_a_failed_save_drops_what_was_known(ranks: Any, tmp_path: Path, job: Any) -> None:
    assert ranks.run(2, job, after_failures, str(tmp_path)) == [[True] * 5] * 2


def at_once(folder: str) -> list[bool]:
    """Several threads of each rank save the same plan to different places, over a group of their own each."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(world))) for _ in range(3)]
    mesh = init_device_mesh("cpu", (world,))

    def work(number: int) -> None:
        for step in range(4):
            dcp.save(
                model(mesh, float(number + step)), checkpoint_id=f"{folder}/{number}", process_group=groups[number]
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return [loads(f"{folder}/{number}", model(mesh, number + 3.0)) for number in range(3)]


@JOBS
def test_saves_in_flight_do_not_mix(ranks: Any, tmp_path: Path, job: Any) -> None:
    assert ranks.run(2, job, at_once, str(tmp_path)) == [[True] * 3] * 2


class OwnGlobalPlan(dcp.DefaultSavePlanner):
    """Decides itself, which nobody may decide for it."""

    calls = 0

    def create_global_plan(self, all_plans: Any) -> Any:
        type(self).calls += 1
        return super().create_global_plan(all_plans)


def own_plans(folder: str) -> tuple[int, bool]:
    OwnGlobalPlan.calls = 0
    for step in range(3):
        dcp.save({"x": torch.full((3,), float(step))}, checkpoint_id=folder, planner=OwnGlobalPlan())
    return OwnGlobalPlan.calls, loads(folder, {"x": torch.full((3,), 2.0)})


def test_planners_with_a_global_plan_of_their_own_are_asked_each_time(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, own_plans, str(tmp_path)) == [(3, True), (0, True)]


def metadata_of(folder: str) -> tuple[bool, bool, str]:
    """What `save` gives on this rank is what a reader reads; later it says that it is gone."""
    state = {"x": torch.arange(6.0), "n": {"y": 3}}
    given = dcp.save(state, checkpoint_id=folder)
    unread = dcp.save(state, checkpoint_id=folder)
    again = dcp.save(state, checkpoint_id=folder)
    read = dcp.FileSystemReader(folder).read_metadata()
    same = again.state_dict_metadata == read.state_dict_metadata and again.storage_data == read.storage_data
    same = same and again.planner_data == read.planner_data
    dist.barrier()
    try:
        unread.state_dict_metadata  # noqa: B018
    except dcp.CheckpointNotFoundError as error:
        return same, given is not None, str(error)
    return same, given is not None, ""


def test_the_metadata_that_save_returns(ranks: Any, tmp_path: Path) -> None:
    coordinator, other = ranks.run(2, metadata_of, str(tmp_path))
    assert coordinator == (True, True, "")
    assert other[:2] == (True, True)
    assert "has been replaced since" in other[2]


@pytest.mark.parametrize("enable", [True, False])
def test_one_process_alone(tmp_path: Path, enable: bool) -> None:
    for step in range(3):
        state = {"x": torch.full((3,), float(step)), "n": step}
        dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(enable_plan_caching=enable))
        assert loads(str(tmp_path), state)
