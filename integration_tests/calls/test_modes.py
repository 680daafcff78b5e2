"""Calls under the modes that torch has: what is saved and loaded does not depend on them."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dcp_all as dcp


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def changed(change: Callable[[Any], None], during: Any, after: Any) -> Iterator[None]:
    change(during)
    try:
        yield
    finally:
        change(after)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "default device": lambda: changed(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "default dtype": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "dispatch": PassOn,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


def state() -> dict[str, Any]:
    return {
        "tensor": torch.arange(3.0, dtype=torch.float32, device="cpu"),
        "strided": torch.arange(6, device="cpu")[::2],
        "half": torch.ones(2, dtype=torch.bfloat16, device="cpu"),
        "step": 7,
        "object": {"tensor within": (torch.ones(2, dtype=torch.float32, device="cpu"),)},
    }


def is_like(found: dict[str, Any]) -> bool:
    tensors = all(torch.equal(found[name], state()[name]) for name in ("tensor", "strided", "half"))
    same_kinds = all(found[name].dtype is state()[name].dtype for name in ("tensor", "strided", "half"))
    return (
        tensors
        and same_kinds
        and found["step"] == 7
        and torch.equal(found["object"]["tensor within"][0], torch.ones(2))
    )


@pytest.fixture(scope="module")
def savers() -> Iterator[dict[str, dcp.AsyncSaver]]:
    """A saver of each kind for all tests of this process: the worker is started once."""
    with dcp.AsyncSaver("thread") as thread, dcp.AsyncSaver("process") as process:
        yield {"thread": thread, "process": process}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_a_mode_changes_nothing(savers: dict[str, dcp.AsyncSaver], tmp_path: Path, kind: str) -> None:
    for name, mode in MODES.items():
        place = tmp_path / name
        with mode():
            if kind == "sync":
                dcp.save(state(), checkpoint_id=place)
            else:
                savers[kind].save(state(), checkpoint_id=place).result()
            found = dcp.load_keys(checkpoint_id=place)
            template = {
                "tensor": torch.zeros(3, device="cpu"),
                "strided": torch.zeros(6, dtype=torch.int64, device="cpu")[::2],
            }
            dcp.load(template, checkpoint_id=place)
        assert {value.device.type for value in found.values() if isinstance(value, torch.Tensor)} == {"cpu"}, name
        assert is_like(found), name
        assert torch.equal(template["tensor"], state()["tensor"]), name
        assert torch.equal(template["strided"], state()["strided"]), name


def test_calls_within_a_compiled_function(tmp_path: Path) -> None:
    """They run as they are written: `torch.compile` breaks its graph there."""
    model = torch.nn.Linear(2, 2)
    app = dcp.app_state(model, torch.optim.AdamW(model.parameters()))

    def step(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        doubled = values * 2
        dcp.save({"x": doubled, "n": {"s": 1}}, checkpoint_id=tmp_path / "sync")
        template = {"x": torch.zeros(3)}
        dcp.load(template, checkpoint_id=tmp_path / "sync")
        part = dcp.load_keys(["x"], checkpoint_id=tmp_path / "sync")["x"]
        future = dcp.async_save({"x": doubled}, checkpoint_id=tmp_path / "async", no_dist=True)
        dcp.save({"app": app}, checkpoint_id=tmp_path / "app")
        return doubled + template["x"] + part, future

    values, future = torch.compile(step, backend="eager")(torch.ones(3))
    assert values.tolist() == [6, 6, 6]
    future.result()
    assert dcp.load_keys(checkpoint_id=tmp_path / "async")["x"].tolist() == [2, 2, 2]
    assert dcp.load_keys(checkpoint_id=tmp_path / "sync")["n"] == {"s": 1}
    assert sorted(dcp.load_keys(checkpoint_id=tmp_path / "app")["app"]) == ["model", "optimizer"]


@pytest.mark.parametrize("kind", ["sync", "thread", "process", "torch.save"])
def test_times_and_storages_come_back_as_they_were(
    savers: dict[str, dcp.AsyncSaver], tmp_path: Path, kind: str
) -> None:
    storage = torch.arange(4, dtype=torch.uint8).untyped_storage()
    values = {
        "twice": dt.datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001 - naive times have folds, too
        "zone": dt.datetime(2024, 10, 27, 2, 30, tzinfo=dt.timezone.utc, fold=1),
        "clock": dt.time(2, 30, fold=1),
        "several": (dt.time(1), [dt.time(1, 2, 3, 4, fold=1)]),
        "storage": storage,
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    if kind in ("sync", "torch.save"):
        dcp.save({"o": (values,)}, checkpoint_id=tmp_path / "c")
    else:
        savers[kind].save({"o": (values,)}, checkpoint_id=tmp_path / "c").result()
    place = tmp_path / "c"
    if kind == "torch.save":
        dcp.convert(tmp_path / "c", tmp_path / "c.pt")
        dcp.convert(tmp_path / "c.pt", tmp_path / "back")
        place = tmp_path / "back"
    (found,) = dcp.load_keys(checkpoint_id=place)["o"]
    for name in ("twice", "zone", "clock", "several"):
        assert repr(found[name]) == repr(values[name])
    assert type(found["storage"]) is torch.UntypedStorage
    assert found["storage"].tolist() == [0, 1, 2, 3]
    assert found["float8"].dtype is torch.float8_e4m3fn
