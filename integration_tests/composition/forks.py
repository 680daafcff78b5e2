"""A process that has imported the libraries, and forks one child per selection.

Run by file name, not as a module: nothing of this repository may be importable in it but what a selection holds. A line
of standard input is a job in JSON (`asked`, `names`, `known`, `path`, `folder`), one of standard output its `error`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import types
from pathlib import Path


def _scenario() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("scenario", Path(__file__).with_name("scenario.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _child(job: dict[str, object], report: Path) -> int:
    """In the child: the scenario; why it failed goes to a file."""
    try:
        sys.path.insert(0, str(job["path"]))
        _scenario().run(tuple(job["names"]), tuple(job["known"]), str(job["folder"]))  # type: ignore[arg-type]
    except BaseException:  # noqa: BLE001 - told to the parent
        report.write_text(traceback.format_exc())
        return 1
    return 0


def main() -> None:
    """Do what standard input asks."""
    import torch
    import torch.distributed.tensor

    sys.path.remove(str(Path(__file__).parent))  # the folder of this file
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        report = Path(f"{job['folder']}.txt")
        child = os.fork()
        if not child:
            os._exit(_child(job, report))
        _, status = os.waitpid(child, 0)
        told = report.read_text() if report.exists() else f"ended with status {status}"
        print(json.dumps({"asked": job["asked"], "error": told if status else None}), flush=True)


if __name__ == "__main__":
    main()
