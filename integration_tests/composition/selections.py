"""Which packages are there together: each alone, every pair, all; and folders that hold exactly them."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import site
import sys
from pathlib import Path

from tools.framework_adapters import is_adapter

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

__all__ = ["PACKAGES", "closure", "libraries", "place", "selections"]

ROOT = Path(__file__).resolve().parents[2]
# Without the adapters, which need frameworks that are not installed here.
PACKAGES = {
    path.parent.name: path.parent
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
    if not is_adapter(path.parent)
}


def closure(names: tuple[str, ...]) -> tuple[str, ...]:
    """The packages of ours that an install of `names` brings."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            project = tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text())["project"]
            needs = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in project.get("dependencies", ()))
            waiting += [need for need in needs if need in PACKAGES]
    return tuple(sorted(found))


def selections() -> list[tuple[str, ...]]:
    """What is asked for: every package alone, every pair, and all at once."""
    singles = [(name,) for name in PACKAGES]
    return [*singles, *itertools.combinations(PACKAGES, 2), tuple(PACKAGES)]


def libraries(folder: Path) -> Path:
    """A folder with everything that is installed here but our packages, their plugins and path files."""
    folder.mkdir()
    sites = [Path(path) for path in [*sys.path, *site.getsitepackages()] if path.endswith("site-packages")]
    ours = re.compile(r"_*(editable_impl_)?dcp_\w+|.*\.pth|__pycache__|_distutils_hack")
    for entry in (entry for each in sites for entry in each.iterdir()):
        target = folder / entry.name
        if not ours.match(entry.name) and not target.exists():
            target.symlink_to(entry)
    return folder


def place(names: tuple[str, ...], folder: Path) -> Path:
    """A folder from which exactly these packages can be imported, and their entry points found."""
    folder.mkdir()
    for name in names:
        module = name.replace("-", "_")
        (folder / module).symlink_to(PACKAGES[name] / "src" / module)
        found = importlib.metadata.distribution(name)
        info = folder / f"{module}-{found.version}.dist-info"
        info.mkdir()
        for file in ("METADATA", "entry_points.txt"):
            text = found.read_text(file)
            if text is not None:
                (info / file).write_text(text)
    return folder
