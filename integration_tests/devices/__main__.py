"""Figures of saves and loads on the accelerator of this machine: `python -m integration_tests.devices --json F`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from integration_tests.devices.figures import measure

parser = argparse.ArgumentParser(prog="integration_tests.devices", description=__doc__)
parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "npu", "pretend"])
parser.add_argument("--bytes", type=int, default=4 << 30, help="bytes of the state")
parser.add_argument(
    "--folder", type=Path, default=None, help="where checkpoints are written, on the file system to try"
)
parser.add_argument("--json", type=Path, required=True, help="the report to write")
given = parser.parse_args()
if given.device == "pretend":
    from integration_tests.devices import pretend

    pretend.install()
report = measure(given.device, given.bytes, folder=given.folder)
given.json.write_text(json.dumps(report, indent=2) + "\n")
print(given.json.read_text())
