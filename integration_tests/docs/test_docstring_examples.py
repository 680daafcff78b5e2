"""The examples in docstrings of the packages' front doors run, and every class that users construct has one.

All run in this process, each in an empty folder, with warnings as errors; those that trace system calls are forked like
the scripts of the docs. `s3://bucket` is a server of the test.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import FunctionType

import pytest

from dcp_async.saver import close_savers
from integration_tests.composition import selections
from integration_tests.docs.page_scripts import PageScripts
from integration_tests.kits.s3_server import S3Server

PACKAGES = sorted(name.replace("-", "_") for name in selections.PACKAGES)  # without adapters of frameworks
EXAMPLE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

FUNCTIONS = (
    *("save", "load", "load_keys", "async_save", "convert"),
    *("app_state", "make_coordinator", "import_lazily", "run_traced", "disk_states"),
)
RECORDS_OF_USERS = ("Fault",)
RETURNED = {
    "TensorProperties": "of an entry of the metadata",
    "FoundCheckpoint": "of a search for checkpoints",
    "Peers": "of a coordinator's own: `PeerOptions` are its settings",
    "HookSpecs": "a contract: plug-ins implement its hooks",
    "LoadPlanner": "a contract: planners derive from it or from `DefaultLoadPlanner`",
}


def front_door() -> dict[str, object]:
    """What the packages offer, by module and name; what several offer once, where it is defined."""
    offered = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or isinstance(value, FunctionType):
                offered[f"{value.__module__.partition('.')[0]}.{name}"] = value
    return offered


def is_constructed_by_users(kind: type) -> bool:
    if issubclass(kind, (BaseException, enum.Enum)) or kind.__name__ in RETURNED or kind.__module__ == "typing":
        return False
    if inspect.isabstract(kind) or getattr(kind, "_is_protocol", False):
        return False
    is_record = (dataclasses.is_dataclass(kind) and kind.__bases__ == (object,)) or kind.__bases__ == (tuple,)
    return not is_record or kind.__name__.endswith("Options") or kind.__name__ in RECORDS_OF_USERS


FRONT_DOOR = front_door()
EXAMPLES = {
    name: found for name, value in FRONT_DOOR.items() if (found := EXAMPLE.findall(inspect.getdoc(value) or ""))
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    pytest.importorskip("moto", reason="needs moto[s3]")
    with S3Server() as server, server.in_environment():
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_savers() -> Iterator[None]:
    yield
    close_savers()


TRACED = {name: codes[0] for name, codes in EXAMPLES.items() if "run_traced" in codes[0]}
BY_NAME = {name: codes[0] for name, codes in EXAMPLES.items() if name not in TRACED}


def script_of(code: str, folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(dedent(code))
    return script


# What PyTorch says of its own calls where there is no process group.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", BY_NAME)
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "s3://" in BY_NAME[name]:
        request.getfixturevalue("bucket")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script_of(BY_NAME[name], tmp_path)), run_name="__main__")


@pytest.mark.traced
def test_examples_that_trace_system_calls_run(tmp_path: Path) -> None:
    with PageScripts() as scripts:
        for name, code in TRACED.items():
            (tmp_path / name).mkdir()
            statuses, output = scripts.run(script_of(code, tmp_path / name), 1)
            assert statuses == [0], (name, output)


def test_what_users_construct_or_call_first_has_an_example() -> None:
    wanted = {
        name
        for name, value in FRONT_DOOR.items()
        if (is_constructed_by_users(value) if isinstance(value, type) else name.partition(".")[2] in FUNCTIONS)
    }
    assert wanted, "nothing found: the test looks in the wrong place"
    assert sorted(wanted - EXAMPLES.keys()) == []


def test_examples_are_short_and_alike() -> None:
    """One to a docstring, of at most 16 lines without its blank ones."""
    assert {name for name, codes in EXAMPLES.items() if len(codes) != 1} == set()
    lengths = {name: sum(bool(line.strip()) for line in codes[0].splitlines()) for name, codes in EXAMPLES.items()}
    assert {name: length for name, length in lengths.items() if length > 16} == {}
