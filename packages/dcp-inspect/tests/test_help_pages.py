"""Help for people who have never used the command: pages, examples that run, suggestions, both of its names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_inspect import cli

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]

_COMMENT = re.compile(r"\s+#.*")


def lines_of(page: str) -> list[str]:
    return [_COMMENT.sub("", line.strip()) for line in page.splitlines() if line.startswith("    dcp ")]


def all_examples() -> list[str]:
    modules = (importlib.import_module(f"dcp_inspect.commands.{module}") for module, _ in cli.COMMANDS.values())
    pages = [cli.dcp.epilog, *(module.command.epilog for module in modules)]
    return [line for page in pages for line in lines_of(re.sub("^  ", "    ", page or "", flags=re.MULTILINE))]


EXAMPLES = all_examples()


def test_every_command_has_examples() -> None:
    assert {line.split()[1] for line in EXAMPLES} == set(cli.COMMANDS)


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_pages_show_their_examples_as_they_are(name: str | None, dcp: Dcp) -> None:
    arguments = [] if name is None else [name]
    code, page, err = dcp(*arguments, "--help")
    assert (code, err) == (0, "")
    assert lines_of(page)
    assert set(lines_of(page)) <= set(EXAMPLES)
    assert dcp("help", *arguments)[1] == page


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write) -> None:
    here = tmp_path / "here"
    for step in (100, 200):
        write(here / "runs" / f"step-{step}")
    write(here / "bucket" / "runs" / "step-100")
    write(here / "bucket" / "runs" / "step-200")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    if re.search(r"\.(pt|safetensors|hf)\b|^dcp convert", line):
        _write_other_formats()
    if "unquarantine" in line:
        (here / "runs" / "step-200" / ".dcp-quarantined.json").write_text('{"reason": "a bit flipped"}')
    line = line.replace("s3://bucket", "bucket")  # storages in the cloud have tests of their own
    name, *arguments = shlex.split(line.partition(" > ")[0])
    code, out, err = dcp(*(os.path.expanduser(each) for each in arguments))
    assert name == "dcp"
    assert (code, err) in {(0, ""), (1, "")} if arguments[0] == "diff" else (code, err) == (0, "")
    assert out


def _write_other_formats() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("dcp_format")
    from safetensors.torch import save_file

    torch.save({"model": {"weight": torch.ones(2)}}, "model.pt")
    save_file({"model.weight": torch.ones(2)}, "model.safetensors")
    for folder in ("runs/step-100", "runs/step-200"):  # whose note is no object that can be converted
        from dcp_core import save

        shutil.rmtree(folder)
        save({"model": {"weight": torch.ones(4, 2)}, "step": 7}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("shwo", "show"), ("lst", "ls"), ("list", "ls"), ("delete", "rm"), ("compare", "diff"), ("Verify", "verify"),
        ("info", "show"), ("chekc", "verify"), ("pruen", "prune"), ("version", "--version"), ("xyzzy", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [(), ("help",)])
def test_suggestions(typed: str, meant: str | None, before: tuple[str, ...], dcp: Dcp) -> None:
    code, out, err = dcp(*before, typed)
    assert (code, out) == (2, "")
    assert f"No such command '{typed}'." in err
    assert ("Did you mean" in err) == (meant is not None)
    assert meant is None or err.rstrip().endswith(f"Did you mean {meant}?")


def test_without_arguments_the_page_is_printed(dcp: Dcp) -> None:
    code, out, err = dcp()
    assert code == 2
    assert (out + err).splitlines()[0].startswith("Usage: dcp")
    assert len((out + err).splitlines()) > 20


@pytest.mark.parametrize("option", ["-v", "-V", "--version"])
def test_version(option: str, dcp: Dcp) -> None:
    assert re.fullmatch(r"dcp, version \d+\.\d+\.\d+\n", dcp(option)[1])


@pytest.mark.parametrize(
    ("started", "name"), [("/usr/bin/dcp-inspect", "dcp-inspect"), ("/x/dcp", "dcp"), ("-m", "dcp")]
)
def test_advice_names_the_command_that_was_started(
    started: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp, write: Write
) -> None:
    write(tmp_path / "runs" / "step-1")
    monkeypatch.setattr("sys.argv", [started])
    assert f"`{name} verify -r " in dcp("verify", tmp_path / "runs")[2]
    assert dcp("ls", "--help")[1].startswith(f"Usage: {name} ls")
