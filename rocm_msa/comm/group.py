"""Agreement between the ranks of a group: everybody learns everybody's answer, or all raise."""

from __future__ import annotations

from typing import Any, Protocol

from rocm_msa.errors import expect


class Group(Protocol):
    """What is asked of a group of ranks. `all_gather_object` is collective, in rank order."""

    rank: int
    ranks: int

    def all_gather_object(self, value: Any) -> list[Any]: ...


class DistributedGroup:
    """A torch.distributed process group; one with a CPU backend (gloo) is enough.

    Args:
        group: None stands for the default group.
    """

    def __init__(self, group: Any = None) -> None:
        from torch import distributed

        self._distributed, self._group = distributed, group
        self.rank = distributed.get_rank(group)
        self.ranks = distributed.get_world_size(group)

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered = [None] * self.ranks
        self._distributed.all_gather_object(gathered, value, group=self._group)
        return gathered


def as_group(group: Any) -> Group:
    """`group` itself when it has rank, ranks and all_gather_object, else a DistributedGroup.

    Raises:
        ValueError: a rank outside of 0..ranks - 1, as a process that is no member has.
    """
    wanted = ("rank", "ranks", "all_gather_object")
    if not all(hasattr(group, name) for name in wanted):
        group = DistributedGroup(group)
    if not 0 <= group.rank < group.ranks:
        raise ValueError(expect("group.rank", f"0..{group.ranks - 1}", group.rank))
    return group


class Disagreement(RuntimeError):
    """What the ranks could not agree on. `reasons` are the same, in the same order, on all."""

    def __init__(self, subject: str, reasons: list[str]):
        self.subject, self.reasons = subject, tuple(reasons)
        super().__init__(f"{subject}:" + "".join(f"\n  - {reason}" for reason in reasons))


def differences(terms: list[dict[str, Any]]) -> list[str]:
    """Where the terms of a rank are not those of rank 0, a line each."""
    found = []
    for rank, own in enumerate(terms):
        for name in dict.fromkeys((*terms[0], *own)):
            want, got = (t.get(name, "nothing") for t in (terms[0], own))
            if want != got:
                found.append(f"rank {rank}: " + expect(name, f"{want}, as rank 0", got))
    return found
