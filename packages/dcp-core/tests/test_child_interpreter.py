"""What another interpreter of ours finds first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dcp_core.calls import module_command


def test_the_working_folder_is_not_searched(tmp_path: Path) -> None:
    """Neither for the module, nor for what it imports; `PYTHONPATH` is, in its order."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, word in ((there, "right"), (here, "wrong")):
        folder.mkdir()
        (folder / "of_ours.py").write_text(
            f"import queue, sys\ndef main(arguments):\n    print('{word}', *arguments, sys.path.count(''))\n"
        )
    (here / "queue.py").write_text("raise SystemExit('hijacked')")
    ran = subprocess.run(
        module_command("of_ours", "7", "x"),
        cwd=here,
        env={"PYTHONPATH": str(there)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("right 7 x 0\n", "")
    assert module_command("of_ours")[0] == sys.executable
