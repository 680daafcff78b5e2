"""`partners_of`: which host gets a copy of which host's part."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["partners_of"]


def partners_of(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return for the leader of each store the leader of the store that gets a copy: one on the next machine.

    Stores on one machine (such as of two containers) never back each other up.

    Args:
        machines: For each machine, the leaders of the stores on it.

    Returns:
        Leader → leader of its partner; empty if there is one machine alone.

    Example:
        ```python
        from dcp_memory.partners.ring import partners_of

        assert partners_of([[0], [2], [4]]) == {0: 2, 2: 4, 4: 0}
        ```
    """
    if len(machines) < 2:
        return {}
    return {
        leader: following[place % len(following)]
        for number, machine in enumerate(machines)
        for following in [machines[(number + 1) % len(machines)]]
        for place, leader in enumerate(machine)
    }
