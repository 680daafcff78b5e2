"""The modules that a second save passes, in order, as `docs/development/architecture.md` lists them."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

from dcp_ranks.testing.ranks import RankPool
from integration_tests.call_paths.counting import CallPath
from integration_tests.call_paths.operations import one_process

__all__ = ["PAGE", "listed", "measure_second_save", "replaced", "walk_lines"]

PAGE = Path(__file__).resolve().parents[2] / "docs/development/architecture.md"
_BEGIN, _END = "<!-- modules of a second save: generated -->\n", "<!-- end of modules -->\n"


def measure_second_save() -> CallPath:
    """Count the second save of one process."""
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(1)
        try:
            found: dict[str, CallPath] = pool.run(1, one_process, Path(folder))[0]
        finally:
            pool.close()
    return found["second save, one process"]


def walk_lines(path: CallPath) -> str:
    """Return a numbered list of the modules, in the order in which they were first called, each with its first line."""
    explained = {name: (importlib.import_module(name).__doc__ or "").partition("\n")[0] for name in path.modules}
    return "".join(f"{number}. `{name}`: {text}\n" for number, (name, text) in enumerate(explained.items(), start=1))


def listed(page: str) -> str:
    """Return the list in the text of a page."""
    return page.partition(_BEGIN)[2].partition(_END)[0].strip() + "\n"


def replaced(page: str, lines: str) -> str:
    """Return the text of a page with another list."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{lines}\n{_END}{rest.partition(_END)[2]}"
