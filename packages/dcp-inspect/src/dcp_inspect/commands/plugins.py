"""`dcp plugins`: list the plug-ins of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click

from dcp_base import PluginInfo, PluginLoadError, installed
from dcp_inspect.errors import DIFFERENT
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import Cell, json_option, print_json
from dcp_inspect.printing.table import print_table

_SCHEMES = ("storage", "stores")


@dataclass(frozen=True, slots=True)
class Listed:
    """One plug-in."""

    name: str
    distribution: str
    module: str
    hooks: tuple[str, ...]
    offers: tuple[str, ...]
    """Schemes, transforms or formats."""
    problem: str | None


@click.command(
    "plugins",
    epilog=examples(
        "dcp plugins",
        "dcp plugins --load",
    ),
)
@click.option("--load", is_flag=True, help="Import all that plug-ins name, which takes torch, and say what is broken.")
@json_option
def command(load: bool, as_json: bool) -> int:
    """List the plug-ins of installed packages: storages, transforms, converters and others."""
    found = sorted((_listed(info, load=load) for info in installed.list()), key=lambda one: one.name)
    if as_json:
        print_json([asdict(one) for one in found])
    elif not found:
        click.echo("no installed package adds anything; a plugin is an entry point of the group 'dcp'")
    else:
        columns = ("plugin", "package", "hooks", "offers", "state")
        print_table(columns, map(_row, found), drop=("hooks", "package"), wrap=("hooks", "offers", "state"))
    return DIFFERENT if any(one.problem for one in found) else 0


def _listed(info: PluginInfo, *, load: bool) -> Listed:
    problem = info.error
    if load and problem is None:
        try:
            installed.import_offers(info)
        except PluginLoadError as error:
            problem = str(error)
    offers = tuple(dict.fromkeys(_offers(info)))
    said = None if problem is None else " ".join(problem.split())
    return Listed(info.name, info.distribution or "", info.module or "", info.hooks, offers, said)


def _offers(info: PluginInfo) -> Iterator[str]:
    for table, names in info.offers.items():
        yield from (f"{name}://" for name in names) if table in _SCHEMES else names


def _row(one: Listed) -> tuple[Cell, ...]:
    state = (one.problem, "red") if one.problem else ("ok", "green")
    hooks = ", ".join(hook.removeprefix("dcp_register_") for hook in one.hooks)
    return one.name, one.distribution, hooks, ", ".join(one.offers), state
