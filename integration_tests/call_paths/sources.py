"""Figures of the source text: lines of code, words in docstrings, names, exceptions, and modules of one importer."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dcp_io import Sink, Source, Store
from docs_site.reference import documented_names, origin

__all__ = ["Module", "borrowed_names", "count_sources", "read_modules"]

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
_SMALL = 60


@dataclass
class Module:
    """One source file."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Texts that are statements: of modules, classes, functions and attributes."""
        values = [node.value for node in self.nodes if isinstance(node, ast.Expr)]
        return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]

    @cached_property
    def code_lines(self) -> int:
        """Lines that hold anything but docstrings, comments and blanks."""
        numbered = enumerate(map(str.strip, self.text.splitlines()), start=1)
        lines = {number for number, line in numbered if line and not line.startswith("#")}
        for node in self.docstrings:
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(lines)

    def offered(self) -> list[str]:
        """The names in its `__all__`; without one, those defined without an underscore or imported as `X as X`."""
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        defined = [each.name for node in imports for each in node.names if each.asname == each.name]
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names: list[str] = ast.literal_eval(node.value)
                return names
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.append(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined += [each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)]
        return [name for name in defined if not name.startswith("_")]

    def imported(self) -> Iterator[str]:
        """The names that it imports, with the module that they are imported from; submodules look like them."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.partition(":")[0]  # lazily, by name


def read_modules() -> list[Module]:
    """Return the modules of all packages."""
    return [
        Module(".".join(path.relative_to(source).with_suffix("").parts), path.read_text(encoding="utf-8"))
        for source in sorted(PACKAGES.glob("*/src"))
        for path in sorted(source.rglob("*.py"))
    ]


def count_sources() -> dict[str, int]:
    """Return the figures of the sources of all packages."""
    modules = read_modules()
    calls = [node for module in modules for node in module.nodes if isinstance(node, ast.Call)]
    return {
        "lines of code": sum(module.code_lines for module in modules),
        "words in docstrings": sum(len(str(node.value).split()) for module in modules for node in module.docstrings),
        "public names": len(documented_names()),
        "names between packages": len(_between(modules)),
        "exception classes": sum(map(_exceptions, modules)),
        "small modules of one importer": _lone(modules),
        "optional attributes": sum(map(_abilities, modules)),
        "reads by getattr of what may be missing": sum(map(_optional, calls)),
        **{f"members of {kind.__name__}": _members(kind) for kind in (Store, Sink, Source)},
    }


def borrowed_names(module: Module) -> set[tuple[str, str]]:
    """The names that a module imports from modules of other packages, with these modules; suites are left out."""
    package = module.name.partition(".")[0]
    if "testing" in module.name.split(".") or package == "dcp_all":
        return set()
    found = [node for node in module.nodes if isinstance(node, ast.ImportFrom) and (node.module or "")[:4] == "dcp_"]
    return {
        (str(node.module), each.name)
        for node in found
        if str(node.module).partition(".")[0] != package and "testing" not in str(node.module).split(".")
        for each in node.names
    }


def _between(modules: list[Module]) -> set[tuple[str, str]]:
    """What packages import from each other beyond public names, each once, with the module that defines it."""
    borrowed = {(origin(*each), each[1]) for module in modules for each in borrowed_names(module)}
    return borrowed - documented_names()


def _exceptions(module: Module) -> int:
    classes = [node for node in module.nodes if isinstance(node, ast.ClassDef)]
    bases = [[ast.unparse(base).rpartition(".")[2] for base in node.bases] for node in classes]
    return sum(any(name.endswith(("Error", "Exception")) for name in each) for each in bases)


def _lone(modules: list[Module]) -> int:
    """Modules below 60 lines of code that exactly one other module imports.

    Those of dcp-all do not count: they stand for PyTorch's modules of the same names.
    """
    known = {module.name: module for module in modules if not module.name.endswith("__init__")}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in set(module.imported()) & known.keys() - {module.name}:
            importers[name].add(module.name)
    return sum(
        len(found) == 1 and known[name].code_lines < _SMALL and not name.startswith("dcp_all.")
        for name, found in importers.items()
    )


def _abilities(module: Module) -> int:
    """Attributes that planners, writers, readers and stores may have or not: the fields of `…Abilities` records."""
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Abilities")]
    return sum(isinstance(field, ast.AnnAssign) for node in classes for field in node.body)


def _optional(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Name)
        and call.func.id == "getattr"
        and len(call.args) == 3
        and isinstance(call.args[1], ast.Constant)
        and ast.unparse(call.args[2]) == "None"
    )


def _members(kind: type) -> int:
    return sum(not name.startswith("_") for name in vars(kind))
