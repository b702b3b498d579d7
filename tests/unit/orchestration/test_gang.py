"""Gang layout."""

from __future__ import annotations

import pytest

from workflows.messages import GangView
from workflows.scheduling.gang import plan_gang


def view(node: str, gang: str | None, ranks: int, version: int | None) -> GangView:
    return GangView(node=node, gang=gang, ranks=ranks, version=version, free_port=5000)


def test_a_whole_gang_at_the_newest_version_is_kept() -> None:
    plan = plan_gang("new", {"a": 2, "b": 1}, [view("a", "old", 2, 4), view("b", "old", 1, 4)], version=4)
    assert (plan.gang, plan.attached, plan.world_size) == ("old", True, 3)
    assert plan.first_rank == {"a": 0, "b": 2}


@pytest.mark.parametrize(
    "other",
    [view("b", None, 0, None), view("b", "other", 1, 4), view("b", "old", 0, 4), view("b", "old", 1, 3)],
    ids=["a node without ranks", "another gang", "a rank missing", "other weights"],
)
def test_a_gang_that_is_not_whole_starts_again_as_a_whole(other: GangView) -> None:
    plan = plan_gang("new", {"a": 2, "b": 1}, [view("a", "old", 2, 4), other], version=4)
    assert (plan.gang, plan.attached) == ("new", False)
