"""Pages of the reference: the public names of each package, in groups, as mkdocstrings is to show them.

The names are read from the packages' `__init__`, without importing them: adapters need frameworks that are not
installed where the site is built. `events.py` checks that the built site has an entry for each.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from docs_site.generated import PACKAGES

__all__ = [
    "BESIDE_THE_FRONT_DOOR",
    "documented_names",
    "missing_entries",
    "navigation",
    "origin",
    "pages",
    "public_names",
]

MANY = 30
"""Names: a package with more has its classes and errors on pages of their own."""
FIRST = ("save", "load", "load_keys", "async_save", "app_state", "convert", "CheckpointManager", "Tiers", "AsyncSaver")
"""What most users look for comes first in its group, and its group first on the page."""
MIRROR = "dcp_all"
BESIDE_THE_FRONT_DOOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dcp_core": ("plugins", "transforms", "block_transforms", "testing.conformance"),
        "dcp_io": ("testing",),
        "dcp_ranks": ("testing.ranks",),
    }
)
"""Modules that users import from although the package's `__init__` does not offer their names."""
ENTRY = "heading_level: 3, show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false"
GROUPS = ("Functions", "Classes and types", "Errors", "Constants")


def pages() -> dict[str, str]:
    """The reference of each package; of the meta-package where each name is described."""
    made = {}
    for folder in PACKAGES:
        module = folder.name.replace("-", "_")
        made.update(_mirror(module) if module == MIRROR else _package(module))
    return made


def navigation(places: Iterable[str]) -> list[str | dict[str, list[str]]]:
    """The pages as entries of the navigation: those of one package together."""
    entries: list[str | dict[str, list[str]]] = []
    found = sorted(places)
    for place in found:
        folder = place.removesuffix(".md")
        if place.count("/") == 1:
            below = [each for each in found if each.startswith(f"{folder}/")]
            entries.append({Path(folder).name: [place, *below]} if below else place)
    return entries


@cache
def public_names(module: str) -> tuple[str, ...]:
    """The names in `__all__` of a module, in the order of the pages; else those that it imports as themselves."""
    names: Iterable[str] = _aliases(module)
    for statement in _source(module).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names = ast.literal_eval(statement.value)
    return tuple(sorted(names, key=_place))


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name.lower())


@cache
def documented_names() -> frozenset[tuple[str, str]]:
    """All that this reference describes, as the module that defines it and its name: a re-export counts once."""
    fronts = [folder.name.replace("-", "_") for folder in PACKAGES]
    beside = [f"{package}.{name}" for package, names in BESIDE_THE_FRONT_DOOR.items() for name in names]
    return frozenset((origin(module, name), name) for module in (*fronts, *beside) for name in public_names(module))


def missing_entries(anchors: Container[str]) -> list[str]:
    """The public names without an entry, given the anchors of all pages of the reference."""
    modules = [folder.name.replace("-", "_") for folder in PACKAGES]
    return [
        f"{module}.{name}" for module in modules for name in public_names(module) if f"{module}.{name}" not in anchors
    ]


def _folder(package: str) -> Path:
    """Where the sources of a package are."""
    (folder,) = (folder for folder in PACKAGES if folder.name.replace("-", "_") == package)
    return folder / "src"


@cache
def _source(module: str) -> ast.Module:
    """A module, by its dotted name."""
    path = _folder(module.partition(".")[0]).joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def origin(package: str, name: str) -> str:
    """The module that defines a public name of a package, which may be in another package."""
    module = package
    while (found := _imported_from(module, name)) is not None:
        module = found
    return module


def _owner(package: str, name: str) -> str:
    """The package that defines a public name, if the name is public there, too; else the package that was asked."""
    owner = origin(package, name).partition(".")[0]
    return owner if name in public_names(owner) else package


def _imported_from(module: str, name: str) -> str | None:
    """The other module of this repository that a module imports a name from."""
    source = _imports(module).get(name, "")
    return source if source.startswith("dcp_") and source != module else None


@cache
def _imports(module: str) -> Mapping[str, str]:
    """Name → the module that a module imports it from."""
    statements = [each for each in ast.walk(_source(module)) if isinstance(each, ast.ImportFrom)]
    found = {each.asname or each.name: statement.module or "" for statement in statements for each in statement.names}
    return {**found, **{name: found[original] for name, original in _renamed(module).items()}}


@cache
def _aliases(module: str) -> Mapping[str, str]:
    """Name → the name of what a module imports under it, if it says so: `X as X`, or `Y = X`."""
    statements = [each for each in ast.walk(_source(module)) if isinstance(each, ast.ImportFrom)]
    named = {each.asname: each.name for statement in statements for each in statement.names if each.asname}
    return {**named, **_renamed(module)}


def _renamed(module: str) -> dict[str, str]:
    """Other name → the name under which a front door imports it for type checkers."""
    blocks = [each for each in _source(module).body if isinstance(each, ast.If)]
    found = [each for block in blocks for each in block.body if isinstance(each, ast.Assign)]
    return {ast.unparse(each.targets[0]): ast.unparse(each.value) for each in found}


def _is_module(package: str, name: str) -> bool:
    """Whether `from package import name` imports a submodule."""
    path = _folder(package.partition(".")[0]).joinpath(*package.split("."), name)
    return path.is_dir() or path.with_suffix(".py").exists()


def _group(name: str) -> str:
    """The group of a name, by its form: the packages' names follow the usual rules."""
    if name.isupper() or "_TYPE" in name or name.endswith("_T"):
        return "Constants"
    if name[0].islower():
        return "Functions"
    return "Errors" if name.endswith(("Error", "Exception", "Warning")) else "Classes and types"


def _package(module: str) -> dict[str, str]:
    beside = BESIDE_THE_FRONT_DOOR.get(module, ())
    names = [name for name in public_names(module) if name not in beside]
    order = sorted(GROUPS, key=lambda group: not any(_group(name) == group for name in names if name in FIRST))
    groups = {group: [name for name in names if _group(name) == group] for group in order}
    many = len(names) > MANY
    text = [f"# {module}\n\n::: {module}\n    options: {{ members: false }}\n"]
    made = {}
    for group, inside in groups.items():
        entries = [_entry(module, name) for name in inside]
        if many and group in ("Classes and types", "Errors"):
            place = f"reference/{module}/{group.split()[0].lower()}.md"
            made[place] = "\n".join([f"# {module}: {group[0].lower()}{group[1:]}\n", *entries])
            text.append(
                f"\n## {group}\n\nOn [a page of their own]({module}/{Path(place).name}): {_list(module, inside)}.\n"
            )
        elif inside:
            text += [f"\n## {group}\n", *entries]
    for name in beside:
        part = f"{module}.{name}"
        shown = f"::: {part}\n    options: {{ heading_level: {2 if many else 3}, members_order: alphabetical }}\n"
        if many:
            made[f"reference/{module}/{name}.md"] = f"# {part} {{ #{part} }}\n\n{shown}"
        else:
            text.append(f"\n## {part} {{ #{part} }}\n\n{shown}")
    if many and beside:
        listed = ", ".join(f"[`{name}`]({module}/{name}.md)" for name in beside)
        text.append(f"\n## Modules\n\nOn pages of their own: {listed}.\n")
    made[f"reference/{module}.md"] = "\n".join(text)
    return made


def _entry(module: str, name: str) -> str:
    """The docstring of a name under a heading; of what another package describes, its first paragraph and a link."""
    owner = _owner(module, name)
    if owner != module:
        link = f"[`{owner}.{name}`][{owner}.{name}]"
        return f"### {name} {{ #{module}.{name} }}\n\n{_first_paragraph(module, name)}\n\nDescribed at {link}.\n"
    # Where links lead, also if what defines the name is in another package, where the name is not public, or if a
    # submodule of the same name hides it from mkdocstrings.
    defined_in = origin(module, name)
    elsewhere = defined_in.partition(".")[0] != module or _is_module(module, name)
    anchor = f"[](){{ #{module}.{name} }}\n\n" if elsewhere else ""
    described = f"{defined_in}.{name}" if elsewhere else f"{module}.{name}"
    return f"{anchor}::: {described}\n    options: {{ {ENTRY} }}\n"


def _first_paragraph(package: str, name: str) -> str:
    """The first paragraph of the docstring of a public name; empty if it has none, as an alias of a type."""
    for statement in _source(origin(package, name)).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return (ast.get_docstring(statement) or "").partition("\n\n")[0]
    return ""


def _list(module: str, names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"[`{name}`][{module}.{name}]" for name in names)


def _mirror(module: str) -> dict[str, str]:
    """Each name of a module that only re-exports, with the module that documents it."""
    rows, modules, others = [], [], []
    for name in public_names(module):
        owner = _owner(module, name)
        if _is_module(module, name):
            modules.append(f"`{module}.{name}`{{ #{module}.{name} }}")
        elif name in _renamed(module):
            original = f"{_imports(module)[name]}.{_renamed(module)[name]}"
            rows.append(f"| `{name}`{{ #{module}.{name} }} | [`{original}`][{original}] |")
        elif owner != module:
            beside = name in BESIDE_THE_FRONT_DOOR.get(owner, ())
            target = f"({owner}/{name}.md)" if beside else f"[{owner}.{name}]"
            rows.append(f"| `{name}`{{ #{module}.{name} }} | [`{owner}.{name}`]{target} |")
        else:
            others.append(_entry(module, name))
    introduction = " ".join((ast.get_docstring(_source(module)) or "").split())
    text = (
        f"# {module}\n\n{introduction}\n\nModules named as PyTorch's: {', '.join(modules)}.\n\n"
        "| name | described at |\n| --- | --- |\n" + "\n".join(rows) + "\n\n" + "\n".join(others)
    )
    return {f"reference/{module}.md": text}
