"""`dcp help`: print a help page."""

from __future__ import annotations

import click

from dcp_inspect.examples import examples


@click.command("help", epilog=examples("dcp help", "dcp help convert"))
@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def command(ctx: click.Context, name: str | None) -> int:
    """Show how to use COMMAND, as `dcp COMMAND --help` does; without it, list the commands."""
    above = ctx.parent
    if above is None:
        raise click.UsageError("this is a command of dcp")
    if name is None:
        click.echo(above.get_help())
        return 0
    group = above.command
    if isinstance(group, click.Group):
        _, found, _ = group.resolve_command(above, [name])
        if found is not None:
            click.echo(found.get_help(click.Context(found, info_name=name, parent=above)))
    return 0
