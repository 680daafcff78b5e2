"""Hosts as groups of ranks, from the pairs of ranks that have proved to be of one host."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["group_by_host"]


def group_by_host(proved: Mapping[int, Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks into hosts: all ranks of a group have proved to each other, both ways, that they are of one host.

    A proof that only one of the two ranks reports does not count. Where proofs are not transitive (0 with 1, 1 with 2,
    but not 0 with 2), a rank joins the first group with all of whose ranks it has a proof, and else begins its own: two
    ranks of one group can always share memory.

    Args:
        proved: Rank → ranks with which it has proved to be of one host (`Stream.same_host`), with or without itself;
            all ranks are keys.

    Returns:
        The groups in the order of their lowest ranks, with ascending ranks; each rank is in one group.

    Example:
        ```python
        from dcp_ranks import group_by_host

        assert group_by_host({0: [1], 1: [0], 2: [3], 3: [2], 4: [3]}) == ((0, 1), (2, 3), (4,))
        ```
    """
    sets = {rank: frozenset(others) for rank, others in proved.items()}
    hosts: list[list[int]] = []
    for rank in sorted(sets):
        for host in hosts:
            if all(other in sets[rank] and rank in sets[other] for other in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(tuple(host) for host in hosts)
