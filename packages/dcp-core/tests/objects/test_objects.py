from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import io
import operator
import os
import pathlib
import pickle
import random
import sys
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_core.errors import (
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from dcp_core.objects.object_bytes import UnloadableObjectWarning, dump_object, load_object, report_unloadable, scan

DEFAULTS = collections.defaultdict(list, a=[3])

EQUAL = [
    *(0, 1, -1, 255, 2**31, -(2**40), 2**300, 2**5000, 1.5, float("inf"), None, True, False, ..., complex(1, 2)),
    *("", "x", "é\ud800", b"", b"ab", bytearray(b"q"), range(5), slice(1, 2)),
    *([], [1, [2]], (), (1, (2,)), set(), {1, 2}, frozenset({3}), {}, {"a": {1: 2}}),
    *(DEFAULTS, collections.Counter("aab"), collections.OrderedDict(a=1), collections.deque([1, 2], maxlen=5)),
    *(dt.date(2024, 2, 29), dt.time(3, 4), dt.timedelta(days=3, microseconds=1), dt.datetime(2024, 1, 1)),  # noqa: DTZ001
    *(dt.datetime.now(dt.timezone.utc), dt.timezone(dt.timedelta(hours=2), "x")),
    *(pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:\\x")),
    *(decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7)),
    *(argparse.Namespace(lr=1, path=pathlib.Path("x")), types.SimpleNamespace(a=1)),
    *(torch.Size([1, 2]), torch.float32, torch.float8_e4m3fn, torch.device("cuda:3"), torch.strided),
    *(random.Random(3).getstate(), np.random.default_rng(0).bit_generator.state),
    *(np.dtype("f4"), np.dtype(">i8"), np.dtype([("a", "f4"), ("b", "i2", (2,))]), np.dtype("M8[25s]"), np.float32),
]


def stock_bytes(value: object, **kwargs: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    return buffer.getvalue()


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: f"{type(value).__name__}")
def test_what_trainers_store_comes_back(value: object) -> None:
    data = dump_object(value, key="k")
    assert scan(data) == []
    found = load_object(data, key="k")
    assert found == value
    assert type(found) is type(value)
    assert torch.load(io.BytesIO(data), weights_only=False) == value


def test_scalars_that_compare_equal_keep_their_own_archives() -> None:
    scalars = [
        1,
        1.0,
        True,
        "1",
        0,
        0.0,
        -0.0,
        False,
        "",
        None,
        "None",
        float("nan"),
        -float("nan"),
        "x" * 1000,
        1 << 4000,
    ]
    for _ in range(2):
        assert [dump_object(value, key="k") for value in scalars] == [stock_bytes(value) for value in scalars]


ARRAYS = [
    *(np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.zeros(0), np.zeros((3, 0)), np.array(5.0)),
    *(np.asfortranarray(np.ones((3, 4))), np.arange(3, dtype=">i4"), np.ones((2, 2), np.bool_)),
    *(np.float16(1), np.float32(3), np.int64(4), np.bool_(True), np.complex64(1j), np.str_("abc"), np.bytes_(b"ab")),
    *(np.datetime64("2024-01-02"), np.timedelta64(3, "s"), np.array(["2024", "2025"], "M8[ns]")),
    *(np.array(["a", "bc"]), np.array([b"a"]), np.array([1, "x", None], dtype=object)),
    *(np.ones(2, [("a", "i4"), ("b", "f8", (2,))]), np.ones(2, [("a", ">i2")])[0]),
]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{type(value).__name__}-{value.dtype}")
def test_numpy_values_come_back(value: Any, protocol: int) -> None:
    data = stock_bytes(value, pickle_protocol=protocol)
    assert scan(data) == []
    found, expected = load_object(data, key="k"), pickle.loads(pickle.dumps(value, protocol))
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert repr(found) == repr(expected)


def test_arrays_of_numpy_1_come_back() -> None:
    data = pickle.dumps([np.arange(3), np.float32(2)], 2).replace(b"numpy._core.", b"numpy.core.")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{name}", content)
    array, scalar = load_object(archive.getvalue(), key="k")
    assert array.tolist() == [0, 1, 2]
    assert scalar == np.float32(2)


def test_random_state_goes_on_where_it_was() -> None:
    generator = np.random.RandomState(5)
    found = load_object(dump_object(generator.get_state(), key="k"), key="k")
    expected = generator.rand(3).tolist()
    generator.set_state(found)
    assert generator.rand(3).tolist() == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about quantised tensors
def test_tensors_inside_objects() -> None:
    value = (
        torch.arange(3.0),
        torch.nn.Parameter(torch.ones(2)),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    )
    found = load_object(dump_object(value, key="k"), key="k")
    assert torch.equal(found[0], value[0])
    assert type(found[1]) is torch.nn.Parameter
    assert found[2].dtype is torch.float8_e4m3fn
    assert found[3].is_sparse
    assert found[4].is_quantized


def test_defaultdict_keeps_its_factory() -> None:
    found = load_object(dump_object(DEFAULTS, key="k"), key="k")
    found["new"].append(1)
    assert found["new"] == [1]


class Reduced:
    """Pickles as a call of something."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Own:
    """A class of the user."""

    def __init__(self) -> None:
        self.content = {"array": np.arange(2)}


HOSTILE: dict[str, Reduced] = {
    "os.system": Reduced(os.system, ("touch ran",)),
    "eval": Reduced(eval, ("open('ran', 'w')",)),
    "exec": Reduced(exec, ("open('ran', 'w')",)),
    "open": Reduced(open, ("ran", "w")),
    "getattr": Reduced(getattr, (Reduced(__import__, ("os",)), "system")),
    "getattr of an allowed class": Reduced(getattr, (dict, "fromkeys")),
    "partial": Reduced(functools.partial, (open, "ran")),
    "methodcaller": Reduced(operator.methodcaller, ("touch",)),
    "pickle in a pickle": Reduced(pickle.loads, (b"cos\nsystem\n(S'touch ran'\ntR.",)),
    "write through a path": Reduced(pathlib.Path.touch, (pathlib.Path("ran"),)),
    "class made on the fly": Reduced(type, ("T", (), {})),
    "torch.load": Reduced(torch.load, ("ran",)),
    "hub": Reduced(torch.hub.load, ("a/b", "c")),
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_hostile_objects_are_refused_and_do_not_run(
    trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = stock_bytes({"nested": [HOSTILE[trick]]})
    assert scan(data)
    with pytest.raises(UnsafeCheckpointError, match=r"the object 'opt\.sched' names [\w.]+, which is not allowed"):
        load_object(data, key="opt.sched")
    with pytest.raises(UnsupportedValueError, match=r"'opt\.sched'"):
        report_unloadable(data, key="opt.sched", strict=True)
    assert not (tmp_path / "ran").exists()


def test_archives_that_torch_would_run_otherwise(tmp_path: Path) -> None:
    script = io.BytesIO()
    with zipfile.ZipFile(script, "w") as archive:
        archive.writestr("a/constants.pkl", pickle.dumps(()))
        archive.writestr("a/data.pkl", pickle.dumps(Reduced(open, (str(tmp_path / "ran"), "w"))))
    legacy = stock_bytes(HOSTILE["eval"], _use_new_zipfile_serialization=False)
    for data in (script.getvalue(), legacy):
        with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError)):
            load_object(data, key="k")
    assert not (tmp_path / "ran").exists()


def test_classes_of_the_user_need_leave() -> None:
    data = dump_object(Own(), key="cfg")
    name = f"{__name__}.Own"
    assert scan(data) == [name]
    with pytest.raises(UnsafeCheckpointError, match=rf"'cfg' names {name}.*allow_globals=\[Own\]"):
        load_object(data, key="cfg")
    for kwargs in ({"allow_globals": [Own]}, {"trust_objects": True}):
        assert load_object(data, key="cfg", **kwargs).content["array"].tolist() == [0, 1]
    with torch.serialization.safe_globals([Own]):
        assert type(load_object(data, key="cfg")) is Own
        assert scan(data) == []
        report_unloadable(data, key="cfg", strict=True)
    with pytest.warns(UnloadableObjectWarning, match=rf"'cfg' would not load back: it is made of {name}"):
        report_unloadable(data, key="cfg")
    report_unloadable(dump_object({"lr": 1}, key="cfg"), key="cfg", strict=True)


def nested_tuple(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def doubled_tuple(times: int) -> bytes:
    return b")" + b"2\x86" * times


@pytest.mark.parametrize("deep", [nested_tuple(500_000), doubled_tuple(60)], ids=["deep", "doubled"])
@pytest.mark.parametrize(
    "around",
    [
        *((b"}", b"Ns"), (b"}(", b"Nu"), (b"(", b"Nd"), (b"\x8f(", b"\x90"), (b"(", b"\x91")),
        *((b"cbuiltins\nset\n](", b"e\x85R"), (b"cbuiltins\nfrozenset\n](", b"e\x85\x81")),
        *((b"cbuiltins\ndict\n](", b"N\x86e\x85R"), (b"ccollections\nOrderedDict\n](](", b"Nee\x85R")),
    ],
)
def test_what_cannot_be_hashed_is_refused(deep: bytes, around: tuple[bytes, bytes]) -> None:
    """Python's hash of a tuple would end the process, or never end."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + deep.join(around) + b".")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CorruptCheckpointError, match="parts is not allowed"):
        load_object(buffer.getvalue(), key="k")


def test_dangerous_leave_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be allowed"):
        load_object(dump_object(1, key="k"), key="k", allow_globals=[os.system])


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'opt\.f' of type function cannot be saved"):
        dump_object(lambda: None, key="opt.f")


@pytest.mark.parametrize("value", [{"a": 1}, {"a": np.arange(3)}, (torch.ones(3),)])
def test_damaged_bytes_are_named_or_read_right(value: Any) -> None:
    data = dump_object(value, key="k")
    for length in range(0, len(data), 41):
        check_damaged(data[:length], value)
    for at in range(0, len(data), 7):
        check_damaged(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :], None)


def check_damaged(data: bytes, value: Any) -> None:
    """No other error than these two; what loads from a prefix is what was stored."""
    try:
        found = load_object(data, key="the key")
    except (CorruptCheckpointError, UnsafeCheckpointError) as error:
        assert "the key" in str(error)  # noqa: PT017 - it need not raise
    else:
        if value is not None:
            assert str(found) == str(value)


def test_scan_of_garbage() -> None:
    with pytest.raises(CorruptCheckpointError):
        scan(b"garbage")


def test_no_stock() -> None:
    import subprocess

    code = (
        "import sys; from dcp_core.objects.object_bytes import dump_object, load_object; "
        "load_object(dump_object({1: (2.0,)}, key='k'), key='k'); "
        "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("value", [*EQUAL, io.BytesIO(b"x"), io.StringIO("x")], ids=lambda value: type(value).__name__)
def test_what_loads_is_not_reported(value: object, recwarn: pytest.WarningsRecorder) -> None:
    for kept in (value, [value, torch.eye(2).to_sparse()], {"a": (value, torch.nn.Parameter(torch.ones(2)))}):
        report_unloadable(dump_object(kept, key="k"), key="k", strict=True)
    assert not recwarn.list


# What frameworks put into the state dicts that they save: key → value as theirs.
TRAINERS = {
    "torchtitan dataloader": {"dp_rank_0": b"pickled", "world_size": 2},
    "torchtitan metrics of older versions": {"step": torch.tensor(1), "global_avg_losses": io.BytesIO(b"saved")},
    "torchdata": {"_snapshot": {"_snapshot_step": 1}, "_num_workers": 0, "_generator": torch.Generator().get_state()},
    "lightning": {
        "pytorch-lightning_version": "2.6", "callbacks": {"Timer{}": {"time_elapsed": {"train": 1.5}}},
        "hyper_parameters": {"path": pathlib.Path("x"), "opt": argparse.Namespace(lr=1)}, "hparams_name": "kwargs",
        "torch_version": torch.__version__,
    },
    "accelerate": {
        "step": 1, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    },
    "transformers": {"log_history": [{"loss": np.float64(1), "grad_norm": np.float32(1)}], "best_metric": None},
    "schedulers": {"milestones": collections.Counter([1, 2]), "lr_lambdas": [None, {}], "_last_lr": [0.1]},
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_what_frameworks_store_loads_without_leave(name: str, recwarn: pytest.WarningsRecorder) -> None:
    data = dump_object(TRAINERS[name], key="k")
    report_unloadable(data, key="k", strict=True)
    found = load_object(data, key="k")
    assert found.keys() == TRAINERS[name].keys()
    assert {type(value) for value in found.values()} == {type(value) for value in TRAINERS[name].values()}
    assert not recwarn.list
