"""The command line: dispatches to the commands, and turns errors into one line and an exit code.

Modules of commands are imported when the commands run: listing and showing do not import what converting needs.
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import NoReturn

import click

from dcp_inspect.advice import in_options, program
from dcp_inspect.examples import examples
from dcp_inspect.exit_codes import INTERRUPTED, exit_code
from dcp_inspect.printing.json_errors import print_error, wants_json
from dcp_inspect.printing.other_words import meant_command, meant_options

__all__ = ["COMMANDS", "dcp", "main", "run"]

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ls": ("list_checkpoints", "List the checkpoints under a folder."),
        "show": ("show", "Show what a checkpoint or file holds."),
        "cat": ("cat", "Print the values of a tensor or an object."),
        "verify": ("verify", "Check every byte of a checkpoint."),
        "diff": ("diff", "Compare two checkpoints or files."),
        "convert": ("convert", "Convert between checkpoints, torch.save files and safetensors."),
        "plan": ("plan", "Show what each rank of a job would read and write."),
        "rm": ("remove", "Remove a checkpoint."),
        "prune": ("prune", "Remove all but the newest checkpoints under a folder."),
        "plugins": ("plugins", "List what installed packages add."),
        "help": ("help", "Show how to use a command."),
        "completion": ("completion", "Print a script that completes commands in a shell."),
    }
)
"""Command → its module in `dcp_inspect.commands`, and its description."""
_BUG = 1
"""Exit code of Python for an error that nobody has foreseen."""


class _Lazy(click.Group):
    """A click group that imports its commands lazily."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands in the order of the table, and then those of plug-ins."""
        del ctx
        return [*COMMANDS, *_added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None for an unknown name."""
        del ctx
        if cmd_name in COMMANDS:
            module = importlib.import_module(f"dcp_inspect.commands.{COMMANDS[cmd_name][0]}")
            found: click.Command = module.command
            return found
        return _added_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments; the error of an unknown one suggests what may be meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            found = meant_command(args[0], self.list_commands(ctx))
            if found is not None:
                raise click.UsageError(f"{error.message} Did you mean {found}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for the help page, without importing any command."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([*((name, text) for name, (_, text) in COMMANDS.items()), *_added().items()])


def _added() -> dict[str, str]:
    """Return the commands that plug-ins add, by name, with their descriptions."""
    from dcp_hooks import installed  # noqa: PLC0415 - looking for plug-ins takes time that `dcp ls` need not

    offered = {name: installed.offered("commands", name) for name in installed.names("commands")}
    return {name: found[0][0].summary for name, found in offered.items() if name not in COMMANDS}


def _added_command(name: str) -> click.Command | None:
    """Return the command of a plug-in; None for an unknown name."""
    from dcp_hooks import installed, resolve  # noqa: PLC0415 - as above

    if not installed.offered("commands", name):
        return None
    spec, plugin = installed.find("commands", name)
    found: click.Command = resolve(spec.command, plugin)
    return found


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "dcp ls runs                # what is there, newest first",
        "dcp show runs/step-100     # names, dtypes, shapes",
        "dcp verify -r runs         # is it whole?",
        "dcp help convert",
    ),
)
@click.version_option(None, "-v", "-V", "--version", prog_name="dcp", package_name="dcp-inspect")
def dcp() -> None:
    """Inspect, verify, convert and remove distributed checkpoints.

    Paths may be folders, files, or URIs such as s3://bucket/runs.

    Exit codes: 0 done, 1 something differs or is damaged, 2 wrong use, 3 not found, 4 cannot be read, 5 needs another
    package or version, 6 unsafe, 7 already there.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with an exit code that scripts can use."""
    # Characters that the stream cannot encode are escaped, like control characters; the rest is printed unchanged.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code.

    With `--json` among the arguments, an error is a JSON object on stdout, besides the message on stderr.
    """
    given = sys.argv[1:] if arguments is None else [*arguments]
    try:
        return _run(given)
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _run(arguments: list[str]) -> int:
    try:
        result = dcp.main(args=arguments, prog_name=program(), standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - bugs are raised again
        return _failed(error, as_json=wants_json(arguments))
    return result if isinstance(result, int) else 0


def _failed(error: BaseException, *, as_json: bool) -> int:
    """Print an error, and return its exit code. Raises the error itself if it is a bug."""
    code: int | None
    if isinstance(error, click.ClickException):
        code, message = error.exit_code, _print_wrong_use(error)
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        code, message = INTERRUPTED, "interrupted"
        click.echo("dcp: interrupted", err=True)
    else:
        code, message = exit_code(error), in_options(first_line(error))
        if code is not None:
            _say(f"dcp: {message}")
    if as_json:
        print_error(message, _BUG if code is None else code)
    if code is None:
        raise error
    return code


def first_line(error: BaseException) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _print_wrong_use(error: click.ClickException) -> str:
    """Print wrong usage as click does, usage line and message, and return the message.

    The arguments in a message may hold line breaks.
    """
    error.message = in_options(" ".join(error.message.split()))  # type: ignore[misc]  # the same, on one line
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = [name for each in error.ctx.command.params for name in each.opts if name.startswith("--")]
        error.possibilities = meant_options(error.option_name, known)  # type: ignore[misc]
        if error.ctx.command is dcp and error.option_name == "--json":
            error.message += " It goes after the command."  # type: ignore[misc]
    said = io.StringIO()
    error.show(said)
    _say(said.getvalue().rstrip("\n"))
    return error.format_message()


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a bug, with control characters escaped for the terminal."""
    _say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def _say(text: str) -> None:
    from dcp_inspect.printing.output import say  # noqa: PLC0415 - takes numpy, which help and completion need not wait for

    say(text, err=True, lines=True)
