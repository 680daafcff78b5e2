"""`Whereabouts`: which places have a checkpoint: this host, other hosts by copies, and further tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_io import Catalogue, call_in_time, read_copy_note
from dcp_manifest import DcpError, library_logger

__all__ = ["Whereabouts", "find_step"]

_log = library_logger(__name__)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Which places have a checkpoint, as one rank sees it."""

    step: int
    here: bool
    """Whether the nearest place has it; where each host has a place of its own, whether this host has its part."""
    protected: bool
    """Whether each host's part is on another host, too, so that the loss of a host loses nothing."""
    elsewhere: tuple[str, ...]
    """Paths or URIs of further places that have it, such as a slow tier."""

    def __str__(self) -> str:
        """Return one line for logs, such as `step 40: here, protected, in s3://bucket/run`."""
        places = [*(["here"] if self.here else []), *(["protected"] if self.protected else [])]
        return f"step {self.step}: {', '.join([*places, *(f'in {url}' for url in self.elsewhere)]) or 'nowhere'}"


def find_step(catalogues: Sequence[Catalogue], step: int) -> Whereabouts:
    """Return which places have an undamaged checkpoint of a step; one that cannot be read or hangs is passed over.

    Args:
        catalogues: Catalogue of each place, nearest first.
        step: The step.

    Ranks: one; not collective.
    """
    found = [_has(catalogue, step) for catalogue in catalogues]
    protected = found[0] and read_copy_note(catalogues[0].store_of(step)).protected
    further = zip(catalogues[1:], found[1:], strict=True)
    return Whereabouts(step, found[0], protected, tuple(each.store.url for each, has in further if has))


def _has(catalogue: Catalogue, step: int) -> bool:
    try:
        return call_in_time(catalogue.store.url, lambda: catalogue.is_good(step))
    except (OSError, DcpError) as error:
        _log.warning("%s cannot be read: %s", catalogue.store.url, error)
        return False
