"""The commands of the README print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.traced

README = Path(__file__).parents[1] / "README.md"
COMMAND = "#!/bin/sh\nexec {} -c 'import sys; from dcp_crash.command import main; sys.exit(main())' \"$@\"\n"


def test_the_first_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    section = re.split(r"^## ", README.read_text(), flags=re.MULTILINE)[1]
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    assert blocks.keys() == {"py", "sh", "text"}
    (tmp_path / "save_settings.py").write_text(blocks["py"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dcp-crash").write_text(COMMAND.format(sys.executable))
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "dcp-crash").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = ["sh", "-c", blocks["sh"]]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout == blocks["text"]
