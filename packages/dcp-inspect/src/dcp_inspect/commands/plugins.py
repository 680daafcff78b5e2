"""`dcp plugins`: list the plugins of installed packages. Parses their modules as text, so torch is not needed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from dcp_inspect.exit_codes import DIFFERENT
from dcp_inspect.printing.output import Cell, json_option, print_json, print_table

__all__ = ["command"]

_GROUP = "dcp"
_STORES = ("dcp.stores", "dcp.stores.fallback")
_HOOK = "dcp_"


@dataclass(frozen=True, slots=True)
class Listed:
    """One listed plugin."""

    name: str
    distribution: str
    module: str
    hooks: tuple[str, ...]
    offers: tuple[str, ...]
    """Names that its hooks mention: schemes, transforms, formats."""
    problem: str | None


@click.command("plugins")
@click.option("--load", is_flag=True, help="Import each plugin, which takes torch, and say which are broken.")
@json_option
def command(load: bool, as_json: bool) -> int:
    """List the plugins of installed packages: storages, transforms, converters and others."""
    found = sorted((_look_at(point, load=load) for point in entry_points(group=_GROUP)), key=lambda one: one.name)
    if as_json:
        print_json([asdict(one) for one in found])
    elif not found:
        click.echo("no installed package adds anything; a plugin is an entry point of the group 'dcp'")
    else:
        print_table(("plugin", "package", "hooks", "offers", "state"), map(_row, found))
    return DIFFERENT if any(one.problem for one in found) else 0


def _look_at(point: EntryPoint, *, load: bool) -> Listed:
    dist = point.dist
    distribution = f"{dist.name} {dist.version}" if dist is not None else ""
    hooks: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    problem = None
    try:
        tree = ast.parse(_source(point.module).read_text("utf-8"))
        hooks = tuple(_hooks(tree))
        offers = tuple(dict.fromkeys((*_offers(tree), *_schemes(point, hooks))))
        if load:
            point.load()
    except Exception as error:  # noqa: BLE001 - a broken plugin is what is to be shown
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    return Listed(point.name, distribution, point.value, hooks, offers, problem)


def _source(module: str) -> Path:
    """Return the source file of a module, found without importing its package."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {top}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not below and spec.origin is not None:
        return Path(spec.origin)
    for folder in folders:
        for place in (folder.joinpath(*below).with_suffix(".py"), folder.joinpath(*below, "__init__.py")):
            if place.is_file():
                return place
    raise ModuleNotFoundError(f"there is no module {module}")


def _hooks(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(_HOOK):
            yield node.name


def _offers(tree: ast.Module) -> Iterator[str]:
    """Return the keys of the dicts that hooks return, and the schemes of storages."""
    for hook in ast.walk(tree):
        if not (isinstance(hook, ast.FunctionDef) and hook.name.startswith(_HOOK)):
            continue
        for node in ast.walk(hook):
            if isinstance(node, ast.Dict):
                yield from (
                    key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )
            elif isinstance(node, ast.Call):
                yield from (
                    f"{each.value.value!s}://"
                    for each in node.keywords
                    if each.arg == "scheme" and isinstance(each.value, ast.Constant)
                )


def _schemes(point: EntryPoint, hooks: tuple[str, ...]) -> Iterator[str]:
    """Return the URI schemes of a distribution's stores, from their entry points."""
    if point.dist is not None and f"{_HOOK}register_storage" in hooks:
        yield from (f"{each.name}://" for each in point.dist.entry_points if each.group in _STORES)


def _row(one: Listed) -> tuple[Cell, ...]:
    state = (one.problem, "red") if one.problem else ("ok", "green")
    hooks = ", ".join(hook.removeprefix("dcp_register_") for hook in one.hooks)
    return one.name, one.distribution, hooks, ", ".join(one.offers), state
