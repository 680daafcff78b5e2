"""The text that the demo trains on, and which bytes of it a step sees.

The text is Python's own help (`pydoc_data.topics`), so that nothing has to be fetched. A batch depends on the step
alone, never on the world size: a resumed job sees what the uninterrupted one saw.
"""

from __future__ import annotations

from pydoc_data import topics

import torch

__all__ = ["Corpus"]


class Corpus:
    """Python's help topics as one tensor of bytes."""

    def __init__(self) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def batch(self, step: int, *, rows: int, length: int, rank: int, world_size: int) -> torch.Tensor:
        """The rows of step `step` that belong to `rank`.

        Args:
            step: the step, which alone decides the rows of the whole job.
            rows: rows of the whole job, a multiple of `world_size`.
            length: bytes per row that the model reads; one more is returned, as the last target.
            rank: this rank.
            world_size: ranks of the job.

        Returns:
            int64 of shape `(rows / world_size, length + 1)` on the CPU.
        """
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(self.data) - length - 1, (rows,), generator=generator)
        mine = starts.tolist()[rank::world_size]
        return torch.stack([self.data[start : start + length + 1] for start in mine]).long()
