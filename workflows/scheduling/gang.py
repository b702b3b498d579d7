"""How a trainer gang is laid out over its members: ranks, rendezvous, and whether the old processes can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class MemberView(Protocol):
    """What a member says of the trainer ranks that live on it."""

    @property
    def node(self) -> str: ...

    @property
    def gang(self) -> str | None: ...

    @property
    def ranks(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    @property
    def host(self) -> str: ...

    @property
    def free_port(self) -> int: ...


@dataclass(frozen=True)
class GangPlan:
    """One process group. ``attached``: it lives already."""

    gang: str
    attached: bool
    ranks: dict[str, int]
    first_rank: dict[str, int]
    world_size: int
    master_addr: str
    master_port: int


def plan_gang(name: str, ranks: Mapping[str, int], views: Sequence[MemberView], version: int) -> GangPlan:
    """Keep the gang that lives on all members with all ranks at ``version``, else lay out a new one called ``name``.

    A gang is one process group: with one rank missing, or one that holds other
    weights than the newest checkpoint, all of it starts again.
    """
    counts = {view.node: ranks[view.node] for view in views}
    living = {view.gang for view in views}
    complete = all(view.ranks == counts[view.node] and view.version == version for view in views)
    whole = complete and len(living) == 1 and None not in living
    first: dict[str, int] = {}
    total = 0
    for view in views:
        first[view.node] = total
        total += counts[view.node]
    return GangPlan(
        gang=str(views[0].gang) if whole else name,
        attached=whole,
        ranks=counts,
        first_rank=first,
        world_size=total,
        master_addr=views[0].host,
        master_port=views[0].free_port,
    )
