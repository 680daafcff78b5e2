"""Proof that a training resumes exactly: it is trained with and without a kill, and both are compared bit by bit."""

from dcp_prove.judging.report import ResumeError, ResumeReport
from dcp_prove.proof import prove_resume
from dcp_prove.trainer import Trainer

__all__ = ["ResumeError", "ResumeReport", "Trainer", "prove_resume"]
