"""What a scheduler reads of the training stream, and what bounds and refills it."""

from __future__ import annotations

from typing import Any

from storage.ledger import TRAIN, Route

RUN = "demo"


def route(name: str, state: str = "open", version: int = 0) -> Route:
    return Route(name, RUN, name, f"http://{name}", "embedded", 1, version, state)


def test_sessions_are_bounded_by_what_the_engines_with_a_route_decode(player: Any) -> None:
    player.ledger.set_admission(RUN, TRAIN, admit_until=50, target_in_flight=30, samples_per_task=2, per_route=4)
    assert not player.claim(), "no engine has a route"
    player.ledger.put_route(route("a"))
    assert len(player.claim()) == 8
    player.ledger.put_route(route("b", "held"))
    assert len(player.claim()) == 8, "a held route will be open again"
    player.ledger.put_route(route("c", "closed"))
    assert not player.claim()


def test_tasks_that_new_weights_admit_wait_until_most_engines_serve_them(player: Any) -> None:
    bounds = {"admit_until": 8, "target_in_flight": 64, "samples_per_task": 2, "fresh_from": 4, "fresh_version": 1}
    player.ledger.set_admission(RUN, TRAIN, **bounds)
    for name in ("a", "b"):
        player.ledger.put_route(route(name))
    assert len(player.claim()) == 8, "those admitted before"
    player.ledger.put_route(route("c", "closed", version=1))
    assert not player.claim()
    player.ledger.put_route(route("a", version=1))
    assert len(player.claim()) == 8


def test_flow_tells_what_is_ready_under_way_and_may_still_come(player: Any) -> None:
    player.admit(6)
    player.group([0.0, 1.0], version=0)
    player.group([0.0, 1.0], version=2)
    player.claim(1)
    flow = player.ledger.flow(RUN, min_version=1)
    assert (flow.ready, flow.in_flight, flow.supply) == (1, 1, 4)
    assert flow.rate > 0
    assert player.ledger.ordinals_under_way(RUN) == [2]
    assert [group.tokens for group in player.ledger.waiting_groups(RUN)] == [10, 10]


def test_complete_groups_are_listed_with_their_shards_until_a_step_claims_them(player: Any) -> None:
    player.admit(6)
    player.group([0.0, 1.0])
    player.group([0.0, 1.0])
    (first, second) = player.ledger.waiting_refs(RUN, [0, 1])
    assert (first.ordinal, first.shard_key, first.rewards) == (0, "shard-0", (0.0, 1.0))
    assert player.batch(0, 1) is not None
    assert player.ledger.waiting_refs(RUN, [0, 1]) == (second,)


def test_groups_without_variance_are_replaced_where_the_run_asks_for_it(player: Any) -> None:
    player.admit(6)
    player.group([1.0, 1.0])
    player.group([0.0, 1.0])
    rule = {"drop_zero_variance": True, "min_version": 0, "take_partial": False, "refill": True}
    assert player.ledger.claim_batch(RUN, 0, 0, 2, **rule) is None
    assert (player.ledger.ended_groups(RUN), player.ledger.ended_groups(RUN, refill=True)) == (0, 1)
    player.group([0.0, 0.5])
    claim = player.ledger.claim_batch(RUN, 0, 0, 2, **rule)
    assert claim is not None
    assert [group.ordinal for group in claim.groups] == [1, 2]
    assert player.ledger.books(RUN).filtered == {"zero_variance": 2}
