"""`dcp completion`: shell script for completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dcp_inspect.errors import program
from dcp_inspect.examples import examples


@click.command(
    "completion",
    epilog=examples(
        "dcp completion bash > ~/.dcp-completion.bash",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script; for bash: `eval "$(dcp completion bash)"` in ~/.bashrc."""
    from dcp_inspect.cli import dcp  # noqa: PLC0415 - it knows this module

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"{shell} is not known")
    click.echo(kind(dcp, {}, program(), f"_{program()}_COMPLETE".replace("-", "_").upper()).source())
    return 0
