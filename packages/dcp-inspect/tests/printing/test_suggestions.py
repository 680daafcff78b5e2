"""Suggestions for options that a command lacks: other tools' words for them, and misspellings."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import click
import pytest

from dcp_inspect.cli import COMMANDS
from dcp_inspect.printing.suggestions import _OPTIONS, meant_options

Dcp = Callable[..., tuple[int, str, str]]


def options_of(name: str) -> list[str]:
    command: click.Command = importlib.import_module(f"dcp_inspect.commands.{COMMANDS[name][0]}").command
    return [option for each in command.params for option in each.opts if option.startswith("--")]


def all_options() -> list[tuple[str, str]]:
    return [(name, option) for name in COMMANDS for option in options_of(name)]


def test_every_option_has_other_words_and_no_word_is_for_an_option_that_is_gone() -> None:
    assert {option for _, option in all_options()} == set(_OPTIONS)


@pytest.mark.parametrize(("name", "option"), all_options())
def test_a_misspelt_option_is_found(name: str, option: str, dcp: Dcp) -> None:
    for typed in (option.replace("-", "_").replace("__", "--", 1) + "x", option[:-1], option[:3] + option[2:]):
        if typed in options_of(name):
            continue
        code, out, err = dcp(name, typed)
        assert (code, out) == (2, "")
        assert f"No such option '{typed}'." in err
        assert f"'{option}'" in err.rpartition("Did you mean")[2]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("plan --ranks", "--world"), ("plan --nproc-per-node", "--world"), ("plan --nproc_per_node", "--world"),
        ("plan --world-size", "--world"), ("plan --output", "--svg"), ("prune --keep-last", "--keep"),
        ("prune --last", "--keep"), ("prune --dryrun", "--dry-run"), ("rm -y", "--yes"), ("rm -f", "--yes"),
        ("convert --force", "--overwrite"), ("convert --only", "--include"), ("convert --skip", "--exclude"),
        ("convert --max-shard-size", "--shard-size"), ("convert --format", "--to"), ("convert --precision", "--dtype"),
        ("convert --compress", "--compression"), ("ls --format", "--json"), ("show --statistics", "--stats"),
        ("show --levels", "--depth"), ("diff --tolerance", "--atol"), ("diff --names-only", "--keys-only"),
        ("verify --jobs", "--threads"), ("verify -R", "--recursive"), ("verify -j", "--threads"),
        ("plugins --check", "--load"),
    ],
)  # fmt: skip
def test_words_of_other_tools(typed: str, meant: str, dcp: Dcp) -> None:
    code, out, err = dcp(*typed.split())
    assert (code, out) == (2, "")
    assert f"'{meant}'" in err.rpartition("id you mean")[2]


def test_nothing_is_suggested_for_what_is_like_nothing(dcp: Dcp) -> None:
    for typed in ("--xyzzy", "-z", "--"):
        assert meant_options(typed, options_of("convert")) == []
    assert "id you mean" not in dcp("verify", "--xyzzy")[2]


def test_an_option_before_the_command(dcp: Dcp) -> None:
    assert "No such option '--json'. It goes after the command." in dcp("--json", "ls")[2]
