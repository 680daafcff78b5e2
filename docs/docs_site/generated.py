"""Pages of the site that are made of what is there already: READMEs, decisions, docstrings, help texts, entry points.

Each function gives pages: their place on the site → their Markdown. What is written by hand is in `docs/`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import click

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
BESIDE_THE_FRONT_DOOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dcp_async": ("saver",),
        "dcp_core": ("plugins", "toolkit", "transforms", "block_transforms", "testing.conformance"),
        "dcp_format": ("converters",),
        "dcp_io": ("testing",),
        "dcp_ranks": ("testing.ranks",),
        "dcp_state": ("adapters",),
    }
)
"""Modules that users import from although the package's `__init__` does not offer their names."""
HOOK_TABLES = {
    "storage": "dcp_register_storage",
    "stores": "dcp_register_stores",
    "transforms": "dcp_register_transforms",
    "savers": "dcp_register_savers",
    "state_adapters": "dcp_register_state_adapters",
    "converters": "dcp_register_converters",
    "bridges": "dcp_register_bridges",
}


def packages() -> dict[str, str]:
    """The README of each package, with its changes below."""
    pages = {}
    for folder in PACKAGES:
        changes = (folder / "CHANGELOG.md").read_text().replace("\n#", "\n##").removeprefix("# Changelog")
        pages[f"packages/{folder.name}.md"] = f"{(folder / 'README.md').read_text()}\n## Changes\n{changes}"
    return pages


def apis() -> dict[str, str]:
    """The public names of each package, from their docstrings; of the meta-package where each is described."""
    pages = {}
    for folder in PACKAGES:
        module = folder.name.replace("-", "_")
        pages[f"reference/{module}.md"] = _mirror(module) if module == "dcp_all" else _api(module)
    return pages


def _api(module: str) -> str:
    extra = [f"{module}.{name}" for name in BESIDE_THE_FRONT_DOOR.get(module, ())]
    below = [f"\n## `{name}` {{ #in-{name} }}\n\n::: {name}\n    options: {{ heading_level: 3 }}\n" for name in extra]
    return f"# {module}\n\n::: {module}\n{''.join(below)}"


def _mirror(module: str) -> str:
    """Each name of a module that only re-exports, with the module that documents it."""
    imported = [folder.name.replace("-", "_") for folder in PACKAGES if not _is_adapter(folder)]
    owners = {name: _public(name) for name in imported}
    offered = importlib.import_module(module)
    rows, modules = [], []
    for name in sorted(offered.__all__, key=str.lower):
        found = next((owner for owner, names in owners.items() if owner != module and name in names), None)
        if found is not None:
            rows.append(f"| `{name}` | [`{found}.{name}`][{found}.{name}] |")
        else:
            modules.append(f"`{module}.{name}`")
    introduction = " ".join((offered.__doc__ or "").split())
    return (
        f"# {module}\n\n{introduction}\n\nModules named as PyTorch's: {', '.join(modules)}.\n\n"
        "| name | described at |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _is_adapter(folder: Path) -> bool:
    """Whether a package adapts a framework, which is not installed where the site is built."""
    return re.search(r"^adapter = true$", (folder / "pyproject.toml").read_text(), re.MULTILINE) is not None


def _public(module: str) -> frozenset[str]:
    return frozenset(importlib.import_module(module).__all__)


def hooks() -> dict[str, str]:
    """The hooks as they are declared, and what the packages of this repository offer through them."""
    from dcp_core import plugins  # noqa: PLC0415 - importing it takes PyTorch's time

    lines = ["| hook | offered |", "| --- | --- |"]
    for table, hook in HOOK_TABLES.items():
        lines.append(f"| `{hook}` | {', '.join(f'`{name}`' for name in plugins.names(table)) or '–'} |")
    declared = (
        "\n## Signatures\n\n::: dcp_core.hookspecs.HookSpecs\n\n## Records\n\n"
        "::: dcp_core.hookspecs.StorageBackendSpec\n    options: { show_root_heading: true, heading_level: 3 }\n\n"
        "::: dcp_core.hookspecs.CheckpointEvent\n    options: { show_root_heading: true, heading_level: 3 }\n"
    )
    introduction = "# Hook signatures\n\nFrom the declarations. How to use them: [Hooks](../hooks.md).\n"
    return {
        "reference/hooks.md": f"{introduction}\n## What the packages here offer\n\n`http+dcp` is the example's.\n\n"
        + "\n".join(lines)
        + "\n"
        + declared
    }


def command() -> dict[str, str]:
    """What `dcp --help` says, and each of its commands."""
    from dcp_inspect.cli import dcp  # noqa: PLC0415 - as above

    text = "\n".join(_help(dcp, click.Context(dcp, info_name="dcp", **dcp.context_settings)))
    introduction = "# Options of dcp\n\nAs `--help` prints them. With pictures: [The command](../command.md).\n"
    return {"reference/command.md": introduction + text}


def _help(found: click.Command, context: click.Context) -> Iterator[str]:
    context.terminal_width = 84
    title = context.command_path
    yield f"\n## {title}\n\n```text\n{found.get_help(context)}\n```\n"
    if isinstance(found, click.Group):
        for name in found.list_commands(context):
            below = found.get_command(context, name)
            if below is not None:
                yield from _help(below, click.Context(below, parent=context, info_name=name))


def decisions() -> dict[str, str]:
    """An index of the decisions, which are pages of `docs/` themselves."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    listed = [f"- [{page.read_text().partition(chr(10))[0].removeprefix('# ')}]({page.name})" for page in pages]
    text = "# Decisions\n\nWhat was chosen where there was a choice, why, and what was measured.\n\n"
    return {"decisions/index.md": text + "\n".join(listed) + "\n"}
