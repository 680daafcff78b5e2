"""Pages of the site that are made of what is there already: READMEs, decisions, docstrings, help texts, entry points.

Each function gives pages: their place on the site → their Markdown. What is written by hand is in `docs/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
HOOK_TABLES = {
    "storage": "dcp_register_storage",
    "stores": "dcp_register_stores",
    "transforms": "dcp_register_transforms",
    "state_adapters": "dcp_register_state_adapters",
    "converters": "dcp_register_converters",
}


def packages() -> dict[str, str]:
    """The README of each package, with its changes below."""
    pages = {}
    for folder in PACKAGES:
        changes = (folder / "CHANGELOG.md").read_text().replace("\n#", "\n##").removeprefix("# Changelog")
        pages[f"packages/{folder.name}.md"] = f"{(folder / 'README.md').read_text()}\n## Changes\n{changes}"
    return pages


def hooks() -> dict[str, str]:
    """The hooks as they are declared, and what the packages of this repository offer through them."""
    from dcp_core import plugins  # noqa: PLC0415 - importing it takes PyTorch's time

    lines = ["| hook | offered |", "| --- | --- |"]
    for table, hook in HOOK_TABLES.items():
        lines.append(f"| `{hook}` | {', '.join(f'`{name}`' for name in plugins.names(table)) or '–'} |")
    declared = (
        "\n## Signatures\n\n::: dcp_base.hookspecs.HookSpecs\n\n## Records\n\n"
        "::: dcp_base.hookspecs.StorageBackendSpec\n    options: { show_root_heading: true, heading_level: 3 }\n\n"
        "::: dcp_base.hookspecs.CheckpointEvent\n    options: { show_root_heading: true, heading_level: 3 }\n"
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
