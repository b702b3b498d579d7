"""Routes, which outlive the proxy, and the proxies that act on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.errors import ConfigError, FencedError
from storage.ledger import Ledger, ProxyRecord, Route

RUN = "demo"
ROUTE = Route("lease/a/1", RUN, "a", "http://127.0.0.1:1", "embedded", 1, 0, "open")
LONG_S = 600.0
OVER_S = -1.0


def test_a_route_is_there_after_a_restart(database_url: str) -> None:
    first = Ledger(database_url)
    first.put_route(ROUTE)
    first.close()
    second = Ledger(database_url)
    assert second.routes() == [ROUTE]
    second.close()


def test_a_route_of_an_older_epoch_of_its_node_is_refused_also_after_deletion(ledger: Ledger) -> None:
    newer = replace(ROUTE, lease="lease/b/2", epoch=2)
    ledger.put_route(ROUTE)
    ledger.put_route(newer)
    assert ledger.routes() == [newer]
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.put_route(ROUTE)
    ledger.delete_route(newer.lease, 2)
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.put_route(ROUTE)
    assert ledger.routes() == []


def test_a_route_changes_version_and_state_within_its_epoch(ledger: Ledger) -> None:
    ledger.put_route(ROUTE)
    held = replace(ROUTE, state="held", version=3)
    ledger.put_route(held)
    assert ledger.routes() == [held]
    with pytest.raises(ConfigError, match="'ajar'"):
        ledger.put_route(replace(ROUTE, state="ajar"))


def test_a_late_deletion_leaves_the_newer_route(ledger: Ledger) -> None:
    ledger.put_route(replace(ROUTE, epoch=2))
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.delete_route(ROUTE.lease, 1)
    assert len(ledger.routes()) == 1
    ledger.delete_route("never-there", 1)


def names(proxies: list[ProxyRecord]) -> list[str]:
    return [proxy.proxy for proxy in proxies]


def test_every_change_of_the_routes_raises_their_generation(ledger: Ledger) -> None:
    assert ledger.route_table() == (0, ())
    assert ledger.put_route(ROUTE) == 1
    held = replace(ROUTE, state="held")
    assert ledger.put_route(held) == 2
    assert ledger.route_table() == (2, (held,))
    assert ledger.delete_route(ROUTE.lease, 1) == 3
    assert ledger.route_table() == (3, ())


def test_a_refused_change_raises_no_generation(ledger: Ledger) -> None:
    ledger.put_route(replace(ROUTE, epoch=2))
    with pytest.raises(FencedError):
        ledger.put_route(ROUTE)
    with pytest.raises(FencedError):
        ledger.delete_route(ROUTE.lease, 1)
    assert ledger.route_table().generation == 1


def test_a_hold_is_in_force_once_every_living_proxy_acts_on_it(ledger: Ledger) -> None:
    ledger.register_proxy("p1", "http://p1", LONG_S)
    ledger.register_proxy("p2", "http://p2", LONG_S)
    generation = ledger.put_route(replace(ROUTE, state="held"))
    assert names(ledger.unacknowledged(generation)) == ["p1", "p2"]
    assert ledger.renew_proxy("p1", LONG_S, generation) == generation
    assert names(ledger.unacknowledged(generation)) == ["p2"]
    assert ledger.renew_proxy("p2", LONG_S, 0) == generation
    assert names(ledger.unacknowledged(generation)) == ["p2"]
    ledger.renew_proxy("p2", LONG_S, generation)
    assert ledger.unacknowledged(generation) == []


def test_nobody_waits_for_a_proxy_whose_lease_ran_out(ledger: Ledger) -> None:
    ledger.register_proxy("p1", "http://p1", OVER_S)
    generation = ledger.put_route(ROUTE)
    assert ledger.unacknowledged(generation) == []
    assert ledger.proxies() == []
    assert names(ledger.proxies(live_only=False)) == ["p1"]


def test_a_proxy_without_a_lease_must_register_again_before_it_counts(ledger: Ledger) -> None:
    generation = ledger.put_route(ROUTE)
    ledger.register_proxy("p1", "http://p1", OVER_S)
    for proxy in ("p1", "never-there"):
        with pytest.raises(FencedError, match="register again"):
            ledger.renew_proxy(proxy, LONG_S, generation)
    ledger.register_proxy("p1", "http://p1", LONG_S)
    assert [(p.url, p.routes_seen) for p in ledger.unacknowledged(generation)] == [("http://p1", 0)]


def test_what_a_proxy_has_seen_never_goes_back(ledger: Ledger) -> None:
    generation = ledger.put_route(ROUTE)
    ledger.register_proxy("p1", "http://p1", LONG_S)
    ledger.renew_proxy("p1", LONG_S, generation)
    ledger.renew_proxy("p1", LONG_S, 0)
    assert ledger.unacknowledged(generation) == []


def test_a_retired_proxy_is_gone(ledger: Ledger) -> None:
    ledger.register_proxy("p1", "http://p1", LONG_S)
    ledger.retire_proxy("p1")
    ledger.retire_proxy("p1")
    assert ledger.proxies(live_only=False) == []
    with pytest.raises(FencedError, match="register again"):
        ledger.renew_proxy("p1", LONG_S, 0)


def test_a_proxy_that_died_long_ago_is_forgotten_when_another_begins(ledger: Ledger) -> None:
    ledger.register_proxy("old", "http://old", -100_000.0)
    ledger.register_proxy("p1", "http://p1", LONG_S)
    assert names(ledger.proxies(live_only=False)) == ["p1"]
