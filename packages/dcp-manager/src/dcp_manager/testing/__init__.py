"""Tests of a training: `prove_resume` proves that it goes on after a kill as if it had never been interrupted."""

from dcp_manager.testing.judging.omissions import OMISSIONS, Omission
from dcp_manager.testing.judging.report import Difference, ResumeError, ResumeReport, SizeResult
from dcp_manager.testing.processes import RunFailedError
from dcp_manager.testing.prove_resume import prove_resume
from dcp_manager.testing.trainer import StepResult, Trainer

__all__ = [
    "OMISSIONS",
    "Difference",
    "Omission",
    "ResumeError",
    "ResumeReport",
    "RunFailedError",
    "SizeResult",
    "StepResult",
    "Trainer",
    "prove_resume",
]
