"""Names of timeouts and other times follow the table of `docs/glossary.md`; printed defaults are the real ones."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_async import SaverOptions, WorkerOptions
from dcp_core import PeerOptions, load, save
from dcp_manager import CheckpointManager
from dcp_tiers import Tiers

ROOT = Path(__file__).parents[2]
ENDINGS = {
    "timeout": r"(\w+_)?timeout_seconds",
    "grace": r"(\w+_)?grace_seconds",
    "stale": r"stale_after_seconds",
    "deadline": r"deadline",
    "poll": r"(\w+_)?polls?_(seconds|per_second)",
}
FOREIGN = {"dcp_async/queue/jobs.py", "dcp_ranks/transport/store_wire.py", "dcp_ranks/testing/rank_starter.py"}
"""Modules with names of `concurrent.futures.Future`, `subprocess.Popen` and stores of PyTorch."""
DEFAULTS = {
    "timeout_seconds": (save, load, SaverOptions, CheckpointManager),
    "peer_timeout_seconds": (PeerOptions,),
    "save_timeout_seconds": (SaverOptions,),
    "start_timeout_seconds": (WorkerOptions,),
    "heartbeat_timeout_seconds": (WorkerOptions,),
    "close_timeout_seconds": (SaverOptions, CheckpointManager),
    "preemption_timeout_seconds": (CheckpointManager,),
    "hosts_timeout_seconds": (CheckpointManager.restore,),
    "progress_timeout_seconds": (Tiers,),
    "stale_after_seconds": (CheckpointManager, Tiers),
}


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ClassDef):
            yield from (
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            )
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _misnamed(name: str) -> bool:
    plain = name.lower().lstrip("_")
    words = [ending for word, ending in ENDINGS.items() if word in re.split(r"_", plain)]
    is_time = re.fullmatch(r".*(patience|silence|linger|wait|idle|start|close|stop|answer|connect)_seconds", plain)
    return bool(is_time) or (bool(words) and not any(re.fullmatch(ending, plain) for ending in words))


def _sources() -> list[Path]:
    return sorted(path for path in ROOT.glob("packages/*/src/**/*.py"))


def test_times_have_the_endings_of_the_glossary() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources()
        if not any(str(path).endswith(foreign) for foreign in FOREIGN)
        for name in _names(ast.parse(path.read_text()))
        if _misnamed(name)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("timeout", True),
        ("_CLOSE_SECONDS", True),
        ("grace", True),
        ("deadline_seconds", True),
        ("close_timeout_seconds", False),
        ("deadline", False),
        ("seconds", False),
    ],
)
def test_misnamed_finds_other_endings(name: str, wrong: bool) -> None:
    assert _misnamed(name) is wrong


def test_table_of_timeouts_has_the_defaults_of_the_code() -> None:
    page = (ROOT / "docs/debug-a-hang.md").read_text()
    rows = dict(re.findall(r"`(?:\w+[.(])?(\w+_seconds)=?\)?`[^|]*\| ([\d,]+ s|1 day) \|", page))
    assert rows.keys() == DEFAULTS.keys()
    for name, owners in DEFAULTS.items():
        printed = 86400.0 if rows[name] == "1 day" else float(rows[name].removesuffix(" s").replace(",", ""))
        assert [inspect.signature(owner).parameters[name].default for owner in owners] == [printed] * len(owners), name
