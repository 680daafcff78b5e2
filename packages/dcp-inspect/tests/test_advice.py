"""Errors advise in the command's own options: no Python calls, no arguments of functions, no names of our modules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_inspect import errors
from dcp_manifest import index_of
from dcp_manifest.file.manifest_write import encode

Dcp = Callable[..., tuple[int, str, str]]
PYTHON = re.compile(
    r"\b[a-z_]+\([^)\s]*\)|(?<![-\w`])[a-z_]+=['\"\[A-Z]|\bdcp_[a-z]+\b|storage_options|Planner|PerRank|allow_globals|torch\.load|"
    r"checkpoint_id|storage_reader|pathlib|import "
)
"""What a line of advice for Python has in it."""


class Settings:
    """A class that no allow-list knows."""

    rate = 1


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make files and checkpoints in the working folder, on which commands fail."""
    torch, save = pytest.importorskip("torch"), pytest.importorskip("dcp_core").save
    pytest.importorskip("dcp_format")
    monkeypatch.chdir(tmp_path)
    state = {"model": {"weight": torch.ones(2, 2)}, "step": 7}
    save(state, checkpoint_id="good", no_dist=True)
    save({"a": torch.ones(2), "n": 4}, checkpoint_id="ranks", no_dist=True)
    index = index_of("ranks")
    index.object_owner[:] = 1  # the object is rank 0's alone
    Path("ranks/.metadata").write_bytes(encode(index))
    with pytest.warns(UserWarning, match="would not load back"):
        save({"args": Settings(), "a": torch.ones(2)}, checkpoint_id="classes", no_dist=True)
    torch.save(state, "file.pt")
    torch.save({"args": Settings(), "weight": torch.ones(2)}, "classes.pt")
    torch.save(Settings(), "class.bin")
    torch.save([1, 2], "list.pt")
    Path("text.pt").write_text("no archive")
    Path("empty").mkdir()
    return tmp_path


COMMANDS: dict[str, tuple[int, str]] = {
    # what is typed → exit code, and a part of what is said
    "cat classes args": (6, "never runs"),
    "cat classes.pt args": (6, "never runs"),
    "show class.bin": (6, "never runs"),
    "convert classes.pt out": (6, "never runs"),
    "diff classes.pt classes": (6, "never runs"),
    "show list.pt": (4, "not a state dict"),
    "show text.pt": (5, "no known format"),
    "verify file.pt": (5, "a file"),
    "plan file.pt --world 2": (5, "a file"),
    "convert good out.safetensors": (4, "(--objects sidecar), leave them out (--objects skip), or name"),
    "convert ranks out.pt": (4, "leave them out (--exclude)"),
    "cat ranks n": (0, "4"),
    "convert good file.pt": (7, "add --overwrite"),
    "convert file.pt good": (7, "add --overwrite"),
    "convert good good": (5, "into itself"),
    "convert good s3://bucket/x.pt": (5, "--to checkpoint"),
    "convert good out --to parquet": (2, "--to 'parquet' is no installed format"),
    "convert good out --compression gzip": (2, "--compression 'gzip' is not known"),
    "convert good out --rename-regex ( x": (2, "--rename-regex '('"),
    "convert good out --rename-regex a \\\\9": (2, "--rename-regex 'a'"),
    "convert good out --rename nothing=x": (3, "no value 'nothing'"),
    "convert good out --rename =": (2, "PREFIX="),
    "convert good out --rename step=model.weight": (4, "would both be named"),
    "convert good out --include nothing": (3, "--include 'nothing' matches no value"),
    "convert good out --include model": (3, "did you mean 'model.*', for all values below it?"),
    "convert good out --exclude *": (3, "--exclude leaves nothing"),
    "convert good file.pt/out": (4, "file.pt is a file, and a checkpoint is a directory"),
    "verify file.pt/out": (3, "nothing at file.pt/out"),
    "convert good out --dtype int8": (2, "--dtype 'int8'"),
    "convert good out --shard-size many": (2, "'many'"),
    "convert good empty": (0, "empty"),
    "cat good nothing": (3, "`dcp show good`"),
    "cat good model.weight[9]": (2, "has shape (2, 2)"),
    "cat good model.weight[x]": (3, "near it: model.weight"),
    "cat good model.weight[::-1]": (2, "steps must be positive"),
    "cat good model.weight[0,0,0]": (2, "has shape (2, 2)"),
    "cat good step[0]": (2, "is no tensor"),
    "ls s3://user:secret@bucket/x": (2, "by the environment"),
    "ls s3://bucket/x?versionId=3": (2, "by the environment"),
    "convert good s3:/bucket/x": (2, "write s3://…, or ./s3:/…"),
    "ls nosuch://x/y": (5, "install dcp-fsspec"),
    "rm https://example.invalid/x --yes": (4, "not removed"),
    "rm empty --yes": (3, "no .metadata"),
    "prune empty --keep 1": (0, "0 of 0"),
    "ls empty": (3, "no checkpoint"),
    "ls file.pt": (3, "is a file"),
    "verify empty": (3, "no checkpoint"),
    "show good --depth 0": (2, "--depth"),
    "plan good --world 0": (2, "--world"),
    "plan good --world 2 --svg empty": (2, "--svg"),
    "completion powershell": (2, "powershell"),
}
SAID: list[str] = []


@pytest.mark.parametrize("typed", COMMANDS)
def test_errors_advise_in_options(typed: str, places: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp) -> None:
    raw: list[str] = []
    before: Any = errors.in_options
    monkeypatch.setattr("dcp_inspect.cli.in_options", lambda text: raw.append(text) or before(text))
    code, out, err = dcp(*typed.replace("\\\\", "\\").split(" "))
    expected, part = COMMANDS[typed]
    said = (out + err).replace(str(places) + os.sep, "")
    assert part in said
    assert code == expected
    assert "Traceback" not in said
    assert not (found := PYTHON.search(said)), f"{found[0]!r} in {said}"
    SAID.extend(raw)


def test_every_translated_phrase_is_met() -> None:
    pytest.importorskip("dcp_fsspec")
    if len(SAID) < 20:
        pytest.skip("needs the errors of the test before, all of them")
    unused = [pattern.pattern for pattern, _ in errors._PHRASES if not any(map(pattern.search, SAID))]
    assert unused == []
