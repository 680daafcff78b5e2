"""Fuzz one target with atheris: `python -m integration_tests.fuzz manifest --seconds 60 --corpus folder`.

Begins with the committed inputs; what it learns goes to the corpus folder, what breaks a target to `--findings`. Ends
with something else than 0 if something broke.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import warnings
from pathlib import Path

import atheris

HERE = Path(__file__).parent
_INSTRUMENTED = ["dcp_manifest", "dcp_io", "dcp_core", "dcp_format", "dcp_transforms", "integration_tests.fuzz"]
_MEMORY_MIB = 2048
_MAX_BYTES = 8192
_INPUT_SECONDS = 10


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, required=True, help="folder for inputs that reach something new")
    parser.add_argument("--findings", type=Path, required=True, help="folder for inputs that break the target")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch  # noqa: F401 - before the instrumentation: none of it is looked at

    with atheris.instrument_imports(include=_INSTRUMENTED):
        from integration_tests.fuzz.targets import TARGETS
    if options.target not in TARGETS:
        parser.error(f"no target {options.target!r}; there are {', '.join(TARGETS)}")
    for folder in (options.corpus, options.findings):
        folder.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arguments = [
        f"-max_total_time={options.seconds}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-malloc_limit_mb={_MEMORY_MIB}",
        f"-timeout={_INPUT_SECONDS}",
        f"-max_len={_MAX_BYTES}",
        f"-artifact_prefix={options.findings}/",
        f"-seed={options.seed}",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    known = [folder / options.target for folder in (HERE / "corpus", HERE / "findings")]
    folders = [str(folder) for folder in (options.corpus, *known) if folder.is_dir()]
    target = TARGETS[options.target]

    def attempt(data: bytes) -> None:
        try:
            target(data)
        except BaseException as error:
            (options.findings / f"{type(error).__name__}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
            raise

    atheris.Setup([sys.argv[0], *arguments, *folders], attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
