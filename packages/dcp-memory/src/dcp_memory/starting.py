"""Starting a keeper from another process, and waiting until it accepts connections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dcp_memory.errors import KeeperStartError

__all__ = ["START_SECONDS", "check_options", "start_process"]

START_SECONDS = 60.0
_OPTIONS = ("max_bytes", "generations", "idle_seconds", "with_parent")


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options with which a keeper is to be started, after a check of their names.

    Raises:
        ValueError: There is no such option.
    """
    given = dict(options or {})
    unknown = sorted(given.keys() - {*_OPTIONS})
    if unknown:
        raise ValueError(f"a keeper has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
    return given


def start_process(run: str, folder: str, options: Mapping[str, Any], seconds: float = START_SECONDS) -> None:
    """Start a keeper in the background, in a session of its own, unless one of this run is there already.

    Args:
        run: Name of the run.
        folder: Folder of keepers.
        options: Options of the keeper, such as `max_bytes`; None stands for the default.
        seconds: Time within which it must accept connections.

    Raises:
        KeeperStartError: It has not started; the message has its output.
    """
    arguments = [run, "--detach"]
    for name, value in options.items():
        if name == "with_parent" and value is True:
            value = os.getpid()
        if value is not None and value is not False:
            arguments.append(f"--{name.replace('_', '-')}={value}")
    # Unlike `python -m`, this imports nothing from the working folder.
    code = "import sys; sys.path = [*filter(None, sys.path)]; from dcp_memory.keeper.__main__ import main; "
    command = [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", *arguments]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "DCP_KEEPER_DIR": folder, "PYTHONPATH": paths}
    try:
        done = subprocess.run(  # noqa: S603 - our own module, by this interpreter
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KeeperStartError(
            f"the keeper of {run} was not ready within {seconds:g} s; see {folder}/{run}.log"
        ) from error
    except OSError as error:
        raise KeeperStartError(f"the keeper of {run} could not be started: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        said = said.rpartition("keeper: error: ")[2] if said.startswith("usage: ") else said
        raise KeeperStartError(f"the keeper of {run} could not be started: {said or done.returncode}")
