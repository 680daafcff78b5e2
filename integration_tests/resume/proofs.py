"""Proofs of the loops with one part left out, on forked ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcp_prove import ResumeReport, processes
from dcp_prove.proof import pickled_factory, prove_job
from integration_tests.resume.forked import run_forked_ranks

__all__ = ["prove"]


def prove(
    loop: Callable[..., Any], folder: Path, sizes: tuple[int, ...], *, steps: int, kill_at: int, **options: Any
) -> ResumeReport:
    """Prove the resume of a loop as `prove_resume` does, with options of the loop."""
    job = {**pickled_factory(partial(loop, **options)), "steps": steps, "backend": "gloo"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "run_ranks", run_forked_ranks)
        return prove_job(job, [kill_at], sizes, folder, None, (), 120.0)
