"""Position in the training data, saved once for all ranks, from which any number of ranks continues exactly."""

from dcp_data.loader import ResumableLoader
from dcp_data.sampler import ResumableSampler
from dcp_data.stream import ResumableStream

__all__ = ["ResumableLoader", "ResumableSampler", "ResumableStream"]
