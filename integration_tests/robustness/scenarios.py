"""Which saves are made to fail, over what, and what must be true afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

import dcp_all as dcp
from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_format.conversion import open_content
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness import states
from integration_tests.robustness.actions import convert
from integration_tests.robustness.zygote import Job, Zygote

__all__ = ["NEW", "NEXT", "OLD", "SCENARIOS", "Found", "Lab", "Scenario"]

OLD, NEW, NEXT = 1, 2, 3
Found = Literal["old", "new", "nothing"]


@dataclass(frozen=True)
class Scenario:
    """What is in the folder, and what the ranks do to it."""

    name: str
    before: str | None
    """How the old checkpoint was made: one of `BEFORE`, or None for an empty folder."""
    world: int = 1
    action: str = "save"
    options: Mapping[str, Any] = field(default_factory=dict)
    of: Literal["own", "started"] = "own"
    """Whose calls are struck: a rank's, or those of the process that it starts."""


LOCAL = {"use_collectives": False}
SET = {"format": "safetensors", "max_file_bytes": 64}
ONE_FILE = {"format": "safetensors", "max_file_bytes": 1 << 30}
_FILES = {"convert", "export"}
"""Actions whose result is no checkpoint, but files of another format."""
RAW = {"layout": "raw", "single_file_per_rank": False}
BEFORE: dict[str, dict[str, Any]] = {
    "torch": {},
    "raw": {"layout": "raw"},
    "rank-local": LOCAL,
    "compressed": {"compression": "auto"},
}
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first save", None),
        Scenario("re-save", "torch"),
        Scenario("re-save, raw, a file per item", "raw", options=RAW),
        Scenario("first save, 2 ranks", None, 2),
        Scenario("re-save, 2 ranks", "torch", 2),
        Scenario("re-save, compressed, 2 ranks", "compressed", 2, options={"compression": "auto"}),
        Scenario("ranks alone, 2 ranks", "rank-local", 2, options=LOCAL),
        Scenario("ranks alone over a global save, 2 ranks", "torch", 2, options=LOCAL),
        Scenario("global over ranks alone, 2 ranks", "rank-local", 2),
        Scenario("over PyTorch's own, 2 ranks", "stock", 2),
        Scenario("in a thread", "torch", action="background", options={"kind": "thread"}),
        Scenario("in a process", "torch", action="background", options={"kind": "process"}, of="started"),
        Scenario("convert to torch.save", None, action="convert", options={"format": "torch"}),
        Scenario("convert to torch.save again", "torch.save", action="convert", options={"format": "torch"}),
        Scenario("convert to safetensors", None, action="convert", options={"format": "safetensors"}),
        Scenario("convert to safetensors again", "safetensors", action="convert", options={"format": "safetensors"}),
        Scenario("export, 2 ranks", None, 2, action="export", options=SET),
        Scenario("export again, 2 ranks", "safetensors", 2, action="export", options=SET),
        Scenario("export one file over several", "safetensors", action="export", options=ONE_FILE),
        Scenario("export one file over one", "one file", action="export", options=ONE_FILE),
        Scenario("export several files over one, 2 ranks", "one file", 2, action="export", options=SET),
    )
}


class Lab:
    """Makes folders ready for a scenario, and judges what is left of them. A context manager.

    Args:
        place: An empty folder to work in; a temporary one if None.
    """

    def __init__(self, place: Path | None = None) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="dcp-crash-") if place is None else None
        self.place = Path(self._own.name) if self._own is not None else Path(str(place))
        self.zygote = Zygote()
        self.made = lru_cache(self._made)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.zygote.close()
        if self._own is not None:
            self._own.cleanup()

    @property
    def root(self) -> Path:
        """The folder of the run whose checkpoint is written."""
        return self.place / "root"

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.root / "job"

    def _made(self, kind: str, version: int) -> Path:
        """A checkpoint, or what one was converted to. Never changed."""
        folder = self.place / f"made-{kind}-{version}"
        if kind == "one file":
            dcp.save_safetensors({"model": states.values(version)["model"]}, folder, no_dist=True)
            return folder
        if kind in {"torch.save", "safetensors"}:
            folder.mkdir()
            convert(str(self.made("torch", version)), str(folder), kind.removesuffix(".save"))
            return folder
        action, options = ("stock", {}) if kind == "stock" else ("save", BEFORE[kind])
        outcome = self.zygote.run(Job(action, str(folder), version, world=2, options=options))
        assert all(end.error is None for end in outcome.ranks), outcome
        return folder

    def ready(self, scenario: Scenario) -> None:
        """Have the folder hold what is there before."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        if scenario.before is not None:
            shutil.copytree(self.made(scenario.before, OLD), self.folder)
        elif scenario.action in _FILES:
            self.folder.mkdir()

    def job(self, scenario: Scenario, **more: Any) -> Job:
        """What the ranks do."""
        options = dict(scenario.options)
        if scenario.action == "convert":
            options["sources"] = {str(NEW): str(self.made("torch", NEW))}
        return Job(
            scenario.action, str(self.folder), NEW, scenario.world, options=options, watch=str(self.root), **more
        )

    def check_clean(self, scenario: Scenario) -> None:
        """A save that failed, and was not killed, has removed what it wrote."""
        if scenario.action in _FILES or scenario.world > 1 or not any(self.folder.glob("*.metadata")):
            return
        if states.version_in(self.folder, [OLD, NEW]) == OLD:
            left = states.debris(self.folder)
            assert left == [], f"the save that failed has left {left}"

    def judge(self, scenario: Scenario, folder: Path | None = None) -> Found:
        """What is left in a run's folder.

        Raises:
            AssertionError: It is not exactly the old or the new, or cannot be saved to.
        """
        root = self.root if folder is None else folder
        if scenario.action in _FILES:
            return self._judge_conversion(scenario, root / "job")
        return _judge_checkpoint(scenario, root)

    def _judge_conversion(self, scenario: Scenario, folder: Path) -> Found:
        kind = scenario.options["format"]
        found = _converted(folder, kind)
        assert found != "nothing" or scenario.before is None, "the old files cannot be loaded any more"
        folder.mkdir(exist_ok=True)
        convert(str(self.made("torch", NEXT)), str(folder), kind)
        assert _converted(folder, kind, NEXT) == "new"
        return found


def _judge_checkpoint(scenario: Scenario, root: Path) -> Found:
    folder = root / "job"
    found: Found = "nothing"
    latest, shallow = dcp.latest_valid(root, deep=True), dcp.latest_valid(root)
    assert (latest and latest.path) == (shallow and shallow.path), "a checkpoint that is there is damaged"
    try:
        found = "new" if states.version_in(folder, [OLD, NEW]) == NEW else "old"
    except CheckpointNotFoundError:
        assert scenario.before is None, "neither the old nor the new checkpoint is there"
        assert latest is None
    else:
        assert latest is not None, "there is a checkpoint, and latest_valid does not find it"
        assert latest.path == folder
    states.save(folder, NEXT, no_dist=True)
    assert states.version_in(folder, [OLD, NEW, NEXT]) == NEXT
    left = states.debris(folder)
    assert all(map(states.MARKER_DEBRIS.fullmatch, left)), f"the next save left {left}"
    if left:  # it goes when it is old
        for name in left:
            os.utime(folder / name, (1000, 1000))
        states.save(folder, NEXT, no_dist=True)
        assert states.debris(folder) == [], "a later save does not clean up"
    return found


def _converted(folder: Path, kind: str, new: int = NEW) -> Found:
    """Which version a converted model is; AssertionError if it is a mix of two."""
    try:
        loaded = _load_converted(folder, kind)
    except (CheckpointNotFoundError, FileNotFoundError, CorruptCheckpointError) as error:
        if isinstance(error, CorruptCheckpointError) and "two saves" not in str(error):
            raise AssertionError(f"damaged: {error}") from error
        return "nothing"
    for version, name in ((OLD, "old"), (new, "new")):
        if same_bits(loaded, {key: states.values(version)["model"][key] for key in states.values(version)["model"]}):
            return name  # type: ignore[return-value]
    raise AssertionError(f"neither of the two was loaded: {loaded}")


def _load_converted(folder: Path, kind: str) -> dict[str, Any]:
    if kind == "torch":
        loaded: dict[str, Any] = torch.load(folder / "model.pt", weights_only=False)
        model: dict[str, Any] = loaded["model"]
        return model
    content = open_content(folder)
    try:
        whole = set(content.tensors)
    finally:
        content.close()
    template = {name: torch.empty_like(value) for name, value in states.values(0)["model"].items()}
    named = {f"model.{name}": value for name, value in template.items()}
    assert whole == named.keys(), f"tensors are missing: {sorted(named.keys() - whole)}"
    dcp.load(named, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    return template
