"""Proofs of the loops with one part left out, on forked ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dcp_prove import ResumeReport
from dcp_prove.proof import Proof, pickled_factory
from integration_tests.resume.forked import run_forked_ranks

__all__ = ["prove"]


def prove(
    loop: Callable[..., Any], folder: Path, sizes: tuple[int, ...], *, steps: int, kill_at: int, **options: Any
) -> ResumeReport:
    """Prove the resume of a loop as `prove_resume` does, with options of the loop."""
    job = {**pickled_factory(partial(loop, **options)), "steps": steps, "backend": "gloo"}
    with Proof(job, [kill_at], run_forked_ranks, 120.0, str(folder)) as proof:
        return proof.run(sizes, None, ())
