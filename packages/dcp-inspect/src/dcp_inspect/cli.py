"""The command line: dispatches to the commands, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import NoReturn

import click

from dcp_base.imports import PARTS, import_part, is_installed
from dcp_inspect.errors import INTERRUPTED, KINDS, first_line, foreseen, in_options, program
from dcp_inspect.examples import examples
from dcp_inspect.printing.suggestions import meant_command, meant_options

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ls": ("list_checkpoints", "List the checkpoints under a directory."),
        "show": ("show", "Show what checkpoints or files hold."),
        "cat": ("cat", "Print the values of a tensor or an object."),
        "verify": ("verify", "Check every byte of checkpoints."),
        "diff": ("diff", "Compare two checkpoints or files."),
        "convert": ("convert", "Convert between checkpoints, torch.save files and safetensors."),
        "plan": ("plan", "Show what each rank of a job would read and write."),
        "latest": ("latest", "Print the path of the newest checkpoint that can be loaded."),
        "du": ("usage", "Show the disk space of checkpoints, and what policies would free."),
        "dedupe": ("dedupe", "Store data files with equal contents once, as hard links."),
        "rm": ("remove", "Remove checkpoints."),
        "prune": ("prune", "Remove all but the newest checkpoints under a directory."),
        "unquarantine": ("unquarantine", "Let readers use a quarantined checkpoint again."),
        "plugins": ("plugins", "List what installed packages add."),
        "help": ("help", "Show how to use a command."),
        "completion": ("completion", "Print a script that completes commands in a shell."),
    }
)
"""Command → its module in `dcp_inspect.commands` and its description."""
_ADDED = "dcp "
_BUG = 1
"""Python's exit code for an unforeseen error."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [*COMMANDS, *_added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name in COMMANDS:
            module = importlib.import_module(f"dcp_inspect.commands.{COMMANDS[cmd_name][0]}")
            found: click.Command = module.command
            return found
        part = f"{_ADDED}{cmd_name}"
        return import_part(part) if part in PARTS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            found = meant_command(args[0], self.list_commands(ctx))
            if found is not None:
                raise click.UsageError(f"{error.message} Did you mean {found}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([*((name, text) for name, (_, text) in COMMANDS.items()), *_added().items()])


def _added() -> dict[str, str]:
    added = {part: text for part, (_, text) in PARTS.items() if part.startswith(_ADDED) and is_installed(part)}
    return {part.removeprefix(_ADDED): text for part, text in added.items()}


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

    Paths may be directories, files, or URIs such as s3://bucket/runs.

    Exit codes: 0 done, 1 something differs or is damaged, 2 wrong use, 3 not found, 4 cannot be read, 5 needs another
    package or version, 6 unsafe, 7 already there.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    # Characters that the stream cannot encode are escaped, like control characters; the rest is printed unchanged.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
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
        return _failed(error, as_json=_wants_json(arguments))
    return result if isinstance(result, int) else 0


def _failed(error: BaseException, *, as_json: bool) -> int:
    code: int | None
    if isinstance(error, click.ClickException):
        code, message = error.exit_code, _print_wrong_use(error)
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        code, message = INTERRUPTED, "interrupted"
        click.echo("dcp: interrupted", err=True)
    else:
        known = foreseen(error)
        code, message = (None, first_line(error)) if known is None else (known[0], in_options(known[1]))
        if code is not None:
            _say(f"dcp: {message}")
    if as_json:
        _print_error(message, _BUG if code is None else code)
    if code is None:
        raise error
    return code


def _print_wrong_use(error: click.ClickException) -> str:
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
    _say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def _say(text: str) -> None:
    from dcp_inspect.printing.output import say  # noqa: PLC0415 - takes numpy, which help and completion need not wait for

    say(text, err=True, lines=True)


def _wants_json(arguments: Sequence[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options or "--json-lines" in options


def _print_error(message: str, code: int) -> None:
    from dcp_inspect.printing.output import print_json  # noqa: PLC0415 - takes numpy, which help need not wait for

    print_json({"error": {"kind": KINDS.get(code, "internal"), "message": message, "exit_code": code}})
